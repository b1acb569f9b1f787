"""Growing a tree by the most probable of its candidates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax.tree import arrays, insertion, state, types


@struct.dataclass(frozen=True, kw_only=True)
class Leaves:
  """The candidates that one draft forward expands; padding comes last."""

  nodes: jax.Array  # i32[B, W] NO_NODE for padding
  token_ids: jax.Array  # i32[B, W] PLACEHOLDER_TOKEN_ID for padding
  depths: jax.Array  # i32[B, W] position = length of the prefix + depth
  # i32[B, W] consecutive rows after the prefix, to be written; those of
  # padding stay free and may lie after the M rows, up to M + W - 1.
  cache_slots: jax.Array
  # bool[B, W, M] rows after the prefix that a leaf sees; none for padding.
  attention_mask: jax.Array


# (carry, leaves) -> (child_token_ids i32[B, W, K], child_log_probs
# f32[B, W, K], carry): the children of each leaf, as `expand` takes them. The
# carry is any pytree, such as the draft's cache.
DraftFn = Callable[[Any, Leaves], tuple[jax.Array, jax.Array, Any]]


def best_candidates(
  tree: state.DraftTree,
  width: int,
  is_growing: jax.Array | bool = True,
) -> Leaves:
  """Returns the most probable candidates of the whole tree, best first.

  There are fewer than `width` (W) if the tree has no more of them, or the
  cache no more rows.

  Args:
    tree: tree that will grow.
    width: W, most candidates.
    is_growing: bool[B] rows that have leaves; the others get padding.
  """
  nodes = tree.nodes
  is_candidate = tree.status == state.CANDIDATE
  is_candidate &= jnp.reshape(is_growing, (-1, 1))
  weights, indices = jax.lax.top_k(
    jnp.where(is_candidate, nodes.log_probs, -jnp.inf), width
  )
  slots = tree.num_expanded[:, None] + jnp.arange(width)[None]
  is_leaf = (weights > -jnp.inf) & (slots < tree.num_cache_rows)
  chosen = tree.nodes_at(indices)
  # A root as leaf finds row 0 in place of a parent's: no row is in use yet.
  parent_slots = arrays.take(nodes.cache_slots, chosen.parents)
  above = arrays.take(tree.row_mask, parent_slots[:, :, None])
  own = slots[:, :, None] == jnp.arange(tree.num_cache_rows)[None, None]
  mask = above | own
  if tree.chain_length > 1:
    mask = _with_leaves_above(mask, is_leaf, chosen.parents, indices)
  return Leaves(
    nodes=jnp.where(is_leaf, indices, state.NO_NODE),
    token_ids=jnp.where(is_leaf, chosen.token_ids, types.PLACEHOLDER_TOKEN_ID),
    depths=jnp.where(is_leaf, chosen.depths, 0),
    cache_slots=slots,
    attention_mask=mask & is_leaf[:, :, None],
  )


def _with_leaves_above(mask, is_leaf, parents, nodes):
  """Adds what the leaves above a leaf see: they are in the same forward."""
  is_parent = (parents[:, :, None] == nodes[:, None]) & is_leaf[:, None]
  sees = state.ancestor_mask(arrays.last_of(is_parent))
  return jnp.any(sees[..., None] & mask[:, None], axis=2)


def root_leaves(tree: state.DraftTree, is_used: jax.Array) -> Leaves:
  """Returns the roots as leaves (W = 1) where bool[B] says so, else padding.

  The roots must be candidates.
  """
  is_used = is_used[:, None]
  root = tree.root_token_ids[:, None]
  zeros = jnp.zeros_like(root)
  own = jnp.arange(tree.num_cache_rows)[None, None] == 0
  return Leaves(
    nodes=jnp.where(is_used, state.ROOT_INDEX, state.NO_NODE),
    token_ids=jnp.where(is_used, root, types.PLACEHOLDER_TOKEN_ID),
    depths=zeros,
    cache_slots=zeros,
    attention_mask=own & is_used[:, :, None],
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
    tree: tree to expand.
    leaves: the tree's `best_candidates`.
    child_token_ids: i32[B, W, K] tokens; those of one leaf must differ.
    child_log_probs: f32[B, W, K] log-softmax of the draft. Tokens with
      probability zero (-inf) are no children.
  """
  tree = _mark_expanded(tree, leaves)
  return _add_children(tree, leaves.nodes, child_token_ids, child_log_probs)


def _mark_expanded(tree, leaves):
  """Gives leaves their rows of the cache."""
  num_leaves = arrays.count(leaves.nodes != state.NO_NODE)
  first = leaves.cache_slots[:, :1]  # the others follow
  leaf = arrays.places_in(leaves.nodes, tree.capacity)
  nodes = tree.nodes
  slots = jnp.where(leaf == state.NO_NODE, nodes.cache_slots, first + leaf)
  rows = jnp.arange(tree.num_cache_rows)[None] - first
  is_new = (rows >= 0) & (rows < num_leaves[:, None])
  row_mask = jnp.where(
    is_new[:, :, None],
    arrays.take(leaves.attention_mask, rows[:, :, None]),
    tree.row_mask,
  )
  return tree.replace(
    packed=nodes.replace(cache_slots=slots).pack(),
    row_mask=row_mask,
    num_expanded=tree.num_expanded + num_leaves,
  )


def _add_children(tree, parents, token_ids, log_probs):
  """Adds tokens [B, W, K] after nodes i32[B, W], or none after NO_NODE."""
  batch_size, _, branching = token_ids.shape
  token_ids, log_probs = (
    x.reshape(batch_size, -1) for x in (token_ids, log_probs)
  )
  parents = jnp.repeat(parents, branching, axis=1)
  above = tree.nodes_at(parents)
  is_child = parents != state.NO_NODE
  if tree.chain_length > 1:
    twins = state.find_children(tree, parents, token_ids)
    is_child &= twins == state.NO_NODE
  new = above.replace(
    token_ids=token_ids,
    parents=parents,
    depths=above.depths + 1,
    log_probs=jnp.where(is_child, above.log_probs + log_probs, -jnp.inf),
    cache_slots=jnp.full_like(parents, state.NO_SLOT),
    is_looked_up=jnp.zeros_like(is_child),
  )
  wide = insertion.widen(tree, new)
  if tree.chain_length > 1:
    wide = insertion.raise_weights(wide, twins, log_probs)
  return insertion.fit(wide, tree.capacity)


def expand_best(
  tree: state.DraftTree,
  carry: Any,
  draft_fn: DraftFn,
  width: int,
  is_growing: jax.Array | bool = True,
) -> tuple[state.DraftTree, Any]:
  """Expands the `width` best candidates with one draft forward."""
  leaves = best_candidates(tree, width, is_growing)
  child_token_ids, child_log_probs, carry = draft_fn(carry, leaves)
  return expand(tree, leaves, child_token_ids, child_log_probs), carry


def grow(
  tree: state.DraftTree,
  carry: Any,
  draft_fn: DraftFn,
  *,
  num_steps: int | jax.Array,
  width: int,
  num_nodes: int | jax.Array | None = 0,
  is_growing: jax.Array | bool = True,
  min_mass: jax.Array | None = None,
) -> tuple[state.DraftTree, Any]:
  """Expands the most probable candidates, step by step.

  No forward runs when no tree can grow. While one can, the others grow with it,
  which costs nothing more. With `min_mass` they do not, so that a tree does not
  depend on its neighbours.

  Args:
    tree: tree to grow.
    carry: argument of the first call of `draft_fn`.
    draft_fn: function that runs the draft model over the leaves of a step.
    num_steps: i32[] number of draft forwards.
    width: W, leaves of a forward.
    num_nodes: size, or i32[B] sizes, that every tree must reach even if that
      takes more steps. None for a static `num_steps` of forwards whatever trees
      become, so that the host can enqueue them all at once.
    is_growing: bool[B] rows that grow.
    min_mass: f32[] or f32[B] `leaf_mass` below which a tree of `num_nodes`
      stops (Dynamic Depth Decoding, arXiv 2409.00142); None for trees that
      never do.

  Returns:
    The tree, and the carry of the last call.
  """
  if num_nodes is None:
    return jax.lax.fori_loop(
      0,
      num_steps,
      lambda _, now: expand_best(*now, draft_fn, width, is_growing),
      (tree, carry),
    )

  def rows_to_grow(step, tree):
    has_candidate = jnp.any(tree.status == state.CANDIDATE, axis=1)
    can_grow = (
      has_candidate & is_growing & (tree.num_expanded < tree.num_cache_rows)
    )
    wants = step < num_steps
    if min_mass is not None:
      wants &= leaf_mass(tree, width) >= min_mass
    return can_grow & (wants | (tree.size < num_nodes))

  def body(now):
    step, tree, carry, rows = now
    rows = is_growing if min_mass is None else rows
    tree, carry = expand_best(tree, carry, draft_fn, width, rows)
    return step + 1, tree, carry, rows_to_grow(step + 1, tree)

  start = jnp.int32(0), tree, carry, rows_to_grow(0, tree)
  return jax.lax.while_loop(lambda now: jnp.any(now[3]), body, start)[1:3]


def leaf_mass(tree: state.DraftTree, width: int) -> jax.Array:
  """Returns f32[B], the probability of the leaves of the next forward.

  It is what the draft takes to be the probability that the text goes on
  through one of them, so a leaf below another one does not count.

  Args:
    tree: tree whose `best_candidates` are the leaves.
    width: W, most leaves.
  """
  leaves = best_candidates(tree, width).nodes
  nodes = tree.nodes_at(leaves)
  # What is above a leaf is expanded, or a leaf, too.
  is_below = arrays.take(tree.status, nodes.parents) == state.CANDIDATE
  is_below &= nodes.parents != types.NO_PARENT
  is_counted = (leaves != state.NO_NODE) & ~is_below
  return jnp.sum(jnp.where(is_counted, jnp.exp(nodes.log_probs), 0.0), axis=1)
