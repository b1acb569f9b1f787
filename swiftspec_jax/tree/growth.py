"""Growing a tree by the most probable of its candidates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax import types
from swiftspec_jax.tree import arrays, state


@struct.dataclass(frozen=True, kw_only=True)
class Leaves:
  """The candidates that one draft forward expands; padding comes last."""

  nodes: jax.Array  # i32[B, W] NO_NODE for padding
  token_ids: jax.Array  # i32[B, W] PLACEHOLDER_TOKEN_ID for padding
  depths: jax.Array  # i32[B, W] position = length of the prefix + depth
  # i32[B, W] consecutive rows behind the prefix, to be written; those of
  # padding stay free and may lie behind the M rows, up to M + W - 1.
  cache_slots: jax.Array
  # bool[B, W, M] rows behind the prefix that a leaf sees; none for padding.
  attention_mask: jax.Array


# (carry, leaves) -> (child_token_ids i32[B, W, K], child_log_probs
# f32[B, W, K], carry): the children of each leaf, as `expand` takes them. The
# carry is any pytree, such as the draft's cache.
DraftFn = Callable[[Any, Leaves], tuple[jax.Array, jax.Array, Any]]


def best_candidates(tree: state.DraftTree, width: int) -> Leaves:
  """Returns the most probable candidates of the whole tree, best first.

  There are fewer than `width` (W) if the tree has no more of them, or the
  cache no more rows.
  """
  is_candidate = tree.status == state.CANDIDATE
  weights, nodes = jax.lax.top_k(
    jnp.where(is_candidate, tree.log_probs, -jnp.inf), width
  )
  slots = tree.num_expanded[:, None] + jnp.arange(width)[None]
  is_leaf = (weights > -jnp.inf) & (slots < tree.num_cache_rows)
  # A root as leaf finds row 0 in place of a parent's: no row is in use yet.
  parents = arrays.take(tree.parents, nodes)
  parent_slots = jnp.maximum(arrays.take(tree.cache_slots, parents), 0)
  above = jnp.take_along_axis(tree.row_mask, parent_slots[:, :, None], axis=1)
  own = slots[:, :, None] == jnp.arange(tree.num_cache_rows)[None, None]
  return Leaves(
    nodes=jnp.where(is_leaf, nodes, state.NO_NODE),
    token_ids=jnp.where(
      is_leaf, arrays.take(tree.token_ids, nodes), types.PLACEHOLDER_TOKEN_ID
    ),
    depths=jnp.where(is_leaf, arrays.take(tree.depths, nodes), 0),
    cache_slots=slots,
    attention_mask=(above | own) & is_leaf[:, :, None],
  )


def expand(
  tree: state.DraftTree,
  leaves: Leaves,
  child_token_ids: jax.Array,
  child_log_probs: jax.Array,
) -> state.DraftTree:
  """Marks leaves as expanded and adds their children as candidates.

  In a full tree the least probable candidates go, old or new. Expanded nodes
  stay: what asks for a place is a candidate, so there are always enough of
  them to drop. A tree of expanded nodes alone waits for its next verdict.

  Args:
    tree: to expand.
    leaves: its `best_candidates`.
    child_token_ids: i32[B, W, K]; those of one leaf must differ.
    child_log_probs: f32[B, W, K] log-softmax of the draft. Tokens with
      probability zero (-inf) are no children.
  """

  def append(old, new):
    new = jnp.broadcast_to(new, child_token_ids.shape)
    return jnp.concatenate([old, new.reshape(old.shape[0], -1)], axis=1)

  is_leaf = leaves.nodes != state.NO_NODE
  slots = arrays.put(
    tree.cache_slots, leaves.nodes, leaves.cache_slots, is_leaf
  )
  weights = arrays.take(tree.log_probs, leaves.nodes)[:, :, None]
  is_child = is_leaf[:, :, None] & (child_log_probs > -jnp.inf)
  wide = tree.replace(
    token_ids=append(tree.token_ids, child_token_ids),
    parents=append(tree.parents, leaves.nodes[:, :, None]),
    depths=append(tree.depths, leaves.depths[:, :, None] + 1),
    log_probs=append(tree.log_probs, weights + child_log_probs),
    cache_slots=append(slots, jnp.int32(state.NO_SLOT)),
    row_mask=arrays.put(
      tree.row_mask, leaves.cache_slots, leaves.attention_mask, is_leaf
    ),
  )
  is_node = append(tree.status != state.EMPTY, is_child)
  is_kept = is_node & ~_surplus(wide, is_node, tree.capacity)
  return state.keep(wide, is_kept, tree.capacity)


def _surplus(tree, is_node, capacity):
  """Returns bool[B, length of the arrays], the candidates without a place."""
  is_candidate = is_node & (tree.cache_slots == state.NO_SLOT)
  scores = jnp.where(is_candidate, -tree.log_probs, -jnp.inf)
  # Of equal weights the higher index goes first, and top_k prefers the lower.
  num_new = tree.capacity - capacity
  _, places = jax.lax.top_k(scores[:, ::-1], num_new)
  num_surplus = arrays.count(is_node) - capacity
  is_surplus = jnp.arange(num_new)[None] < num_surplus[:, None]
  none = jnp.zeros_like(is_node)
  return arrays.put(none, tree.capacity - 1 - places, is_surplus, is_surplus)


def expand_best(
  tree: state.DraftTree, carry: Any, draft_fn: DraftFn, width: int
) -> tuple[state.DraftTree, Any]:
  """Expands the `width` most probable candidates with one draft forward."""
  leaves = best_candidates(tree, width)
  child_token_ids, child_log_probs, carry = draft_fn(carry, leaves)
  return expand(tree, leaves, child_token_ids, child_log_probs), carry


def grow(
  tree: state.DraftTree,
  carry: Any,
  draft_fn: DraftFn,
  *,
  num_steps: int,
  width: int,
) -> tuple[state.DraftTree, Any]:
  """Expands the most probable candidates, step by step.

  Args:
    tree: to grow.
    carry: for the first call of `draft_fn`.
    draft_fn: runs the draft model over the leaves of a step.
    num_steps: draft forwards.
    width: W, leaves of each.

  Returns:
    The tree, and the carry of the last call.
  """
  return jax.lax.fori_loop(
    0,
    num_steps,
    lambda _, now: expand_best(*now, draft_fn, width),
    (tree, carry),
  )


def grow_until(
  tree: state.DraftTree,
  carry: Any,
  draft_fn: DraftFn,
  *,
  num_nodes: int,
  width: int,
) -> tuple[state.DraftTree, Any]:
  """`grow` until every tree has `num_nodes` nodes or can grow no more.

  Without a tree that is too small there is no forward. With one, the others
  grow along: it costs nothing more.
  """

  def is_too_small(now):
    tree = now[0]
    has_candidate = jnp.any(tree.status == state.CANDIDATE, axis=1)
    can_grow = has_candidate & (tree.num_expanded < tree.num_cache_rows)
    return jnp.any((tree.size < num_nodes) & can_grow)

  return jax.lax.while_loop(
    is_too_small,
    lambda now: expand_best(*now, draft_fn, width),
    (tree, carry),
  )
