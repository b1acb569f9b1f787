"""What hidden states of the draft make of leaves: their children.

Legend: B rows, W leaves of a forward, K children of a leaf, D embed.
"""

import jax

from kernels_pallas.vocabulary import largest
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.drafters.trees import forced_acceptance
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params


def expand_roots(
  params: Params,
  tree: tree_lib.DraftTree,
  hidden: jax.Array,
  is_used: jax.Array,
  kv_lengths: jax.Array,
  reference: forced_acceptance.Reference | None,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
) -> tree_lib.DraftTree:
  """Expands the roots of some rows.

  Args:
    params: parameters of the draft.
    tree: tree whose root is a candidate in those rows.
    hidden: [B, 1, D] of the roots.
    is_used: bool[B] the rows.
    kv_lengths: i32[B] of the prefix.
    reference: text that forces acceptance, or None.
    config: configuration of the draft; static.
    tree_config: static sizes of the tree.
  """
  leaves = tree_lib.root_leaves(tree, is_used)
  children = children_of(
    params,
    hidden,
    leaves,
    kv_lengths,
    reference,
    config=config,
    tree_config=tree_config,
  )
  return tree_lib.expand(tree, leaves, *children)


def children_of(
  params: Params,
  hidden: jax.Array,
  leaves: tree_lib.Leaves,
  kv_lengths: jax.Array,
  reference: forced_acceptance.Reference | None,
  *,
  config: ModelConfig,
  tree_config: TreeConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns the K best children of each leaf and their log-probabilities.

  Args:
    params: parameters of the draft.
    hidden: [B, W, D] of the leaves.
    leaves: leaves of the tree.
    kv_lengths: i32[B] of the prefix.
    reference: text that forces acceptance, or None.
    config: configuration of the draft; static.
    tree_config: static sizes of the tree.

  Returns:
    i32[B, W, K] and f32[B, W, K].
  """
  with jax.named_scope('children'):
    logits = decoder.unembed(params, config, hidden)
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, indices = largest.top_k(logits, tree_config.branching)
    log_probs = top - log_total
    token_ids = decoder.token_ids_of(params, config, indices)
  if reference is None:
    return token_ids, log_probs
  return forced_acceptance.force(
    reference,
    token_ids,
    log_probs,
    leaves.token_ids,
    kv_lengths[:, None] + leaves.depths,
    tree_config.forced_acceptance,
  )
