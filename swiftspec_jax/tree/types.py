"""Pytrees that carry one decoding step's data between the parts.

Legend: B rows, S cache capacity, K speculative tokens, T = K + 1 query
tokens (the nodes of a tree, its root included), V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kernels_pallas.vocabulary import largest

Array = jax.Array | np.ndarray

PLACEHOLDER_TOKEN_ID = -1  # fills token rows after the last output token
NO_PARENT = -1  # of roots and padding
NO_OUTCOME = -1  # of rounds without a tree


@struct.dataclass(frozen=True, kw_only=True)
class TreeProposal:
  """A part of the draft's tree for each row: all that the target gets of it.

  Parents stand before their children, the root first, padding last. It goes to
  the target as one array, because each transfer costs the host time.
  """

  token_ids: jax.Array  # i32[B, T] PLACEHOLDER_TOKEN_ID for padding
  parents: jax.Array  # i32[B, T] indices, -1 for root and padding
  depths: jax.Array  # i32[B, T] 0 for the root
  size: jax.Array  # i32[B] nodes
  # What people want to know of a node:
  is_looked_up: jax.Array  # bool[B, T] came of a text first, not of the draft
  # f32[B, T] sum from the root, -inf for padding; NaN where it is not known
  log_probs: jax.Array
  # How the draft came to it, for the statistics:
  outcome: jax.Array  # i32[B] of the last verdict: tree.MISS, LATE_HIT or HIT
  num_forwards: jax.Array  # i32[B] draft forwards after that verdict

  @classmethod
  def of_nodes(
    cls, token_ids: Array, parents: Array, depths: Array, **facts: Array
  ) -> 'TreeProposal':
    """Returns trees that live for one step.

    Args:
      token_ids: i32[B, T].
      parents: i32[B, T].
      depths: i32[B, T].
      **facts: further fields that are known.
    """
    xp = jnp if isinstance(token_ids, jax.Array) else np
    defaults = {
      'is_looked_up': xp.zeros_like(token_ids, bool),
      'log_probs': xp.full_like(token_ids, np.nan, np.float32),
      'size': 1 + (parents != NO_PARENT).sum(axis=1, dtype=np.int32),
      'outcome': xp.full_like(token_ids[:, 0], NO_OUTCOME),
      'num_forwards': xp.zeros_like(token_ids[:, 0]),
    }
    nodes = {'token_ids': token_ids, 'parents': parents, 'depths': depths}
    return cls(**nodes, **(defaults | facts))

  def pack(self) -> Array:
    """Returns i32[B, 5 T + 3]."""
    xp = jnp if isinstance(self.token_ids, jax.Array) else np
    nodes = [
      self.token_ids,
      self.parents,
      self.depths,
      self.is_looked_up.astype(np.int32),
      self.log_probs.view(np.int32),
    ]
    counts = [self.size, self.outcome, self.num_forwards]
    return xp.concatenate([*nodes, *(x[:, None] for x in counts)], axis=1)

  @classmethod
  def unpack(cls, packed: Array) -> 'TreeProposal':
    """Returns what `pack` has packed, on the host or on the devices."""
    num_nodes = packed.shape[1] // 5
    token_ids, parents, depths, is_looked_up, log_probs = (
      packed[:, i * num_nodes : (i + 1) * num_nodes] for i in range(5)
    )
    size, outcome, num_forwards = packed[:, -3:].T
    return cls(
      token_ids=token_ids,
      parents=parents,
      depths=depths,
      is_looked_up=is_looked_up > 0,
      log_probs=log_probs.view(np.float32),
      size=size,
      outcome=outcome,
      num_forwards=num_forwards,
    )


@struct.dataclass(frozen=True, kw_only=True)
class VerifiedTokens:
  """What the draft has to follow: all that it gets of the target.

  One array, as a proposal.
  """

  # i32[B, T] accepted tokens, then the next one, then anything.
  token_ids: jax.Array
  num_tokens: jax.Array  # i32[B] how many count; 0 in rows at their end

  def pack(self) -> jax.Array:
    """Returns i32[B, T + 1]."""
    return jnp.concatenate([self.token_ids, self.num_tokens[:, None]], axis=1)

  @classmethod
  def unpack(cls, packed: jax.Array) -> 'VerifiedTokens':
    return cls(token_ids=packed[:, :-1], num_tokens=packed[:, -1])


# All that the draft gets of the target in a round: packed `VerifiedTokens`
# i32[B, T + 1]. A draft that reads features gets those of the old root and the
# accepted tokens, too, bf16[B, T, H].
PackedVerified = jax.Array | tuple[jax.Array, jax.Array]


@struct.dataclass(frozen=True, kw_only=True)
class Logprobs:
  """Log-probabilities at positions of the output, before any adjustment."""

  chosen: jax.Array  # f32[B, T] of the tokens there
  # The K most probable tokens there, the best first; K may be 0.
  top: jax.Array  # f32[B, T, K]
  top_token_ids: jax.Array  # i32[B, T, K]

  @classmethod
  def at(
    cls, logits: jax.Array, token_ids: jax.Array, num_top: int
  ) -> 'Logprobs':
    """Returns those at tokens.

    Args:
      logits: f32[B, T, V], not adjusted.
      token_ids: i32[B, T]; padding gets anything.
      num_top: number K of the most probable tokens.
    """
    index = jnp.maximum(token_ids, 0)[:, :, None]
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    top, top_token_ids = largest.top_k(log_probs, num_top)
    return cls(
      chosen=jnp.take_along_axis(log_probs, index, axis=2)[:, :, 0],
      top=top,
      top_token_ids=top_token_ids,
    )
