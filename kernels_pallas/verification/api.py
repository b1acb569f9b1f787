"""Verification of a tree by the implementation that suits devices and shape.

Legend: B rows, T nodes of the tree, V vocabulary.
"""

import jax
from jax.sharding import Sharding

from kernels_pallas.vocabulary import vocabulary_dispatch


def verify_tree(
  scores: jax.Array,
  token_ids: jax.Array,
  parents: jax.Array,
  sizes: jax.Array,
  ancestor_mask: jax.Array,
  *,
  implementation: str = 'auto',
  sharding: Sharding | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Chooses a token after each node and follows the nodes that are chosen.

  All implementations decide alike, bit for bit: they compare and never round.

  Args:
    scores: f32[B, T, V], not NaN: logits, or logits of the distribution plus
      Gumbel noise. The highest one is the target's choice after a node; of
      equal ones the first.
    token_ids: i32[B, T] tokens of the nodes.
    parents: i32[B, T] indices of the parents, smaller than that of the node; -1
      for root and padding.
    sizes: i32[B] number of nodes, the root included; padding comes last.
    ancestor_mask: bool[B, T, T], [i, j] is True if j is i or an ancestor of i.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.

  Returns:
    Tokens i32[B, T]: the accepted ones, the one after them, then -1; number of
    accepted nodes i32[B], the root not counted; path i32[B, T]: indices of root
    and accepted nodes, then zeros; and the choices i32[B, T] after all nodes.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  call = vocabulary_dispatch.choose(
    'verify_tree',
    implementation,
    sharding,
    scores,
    f'scores {scores.dtype}{list(scores.shape)}',
  )
  return call(scores, token_ids, parents, sizes, ancestor_mask)
