"""Following a verdict: the last verified token becomes the root."""

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax.tree import arrays, state

# Outcomes: the new root is not in the tree; it is a candidate; it is expanded.
MISS, LATE_HIT, HIT = range(3)
NUM_OUTCOMES = 3


@struct.dataclass(frozen=True, kw_only=True)
class Reroot:
  """What a verdict did to a tree, and does to its rows of the cache.

  `dense.commit(cache, path, num_committed)` brings the cache up to date.
  """

  outcome: jax.Array  # i32[B] MISS, LATE_HIT or HIT
  # i32[B, M] rows to keep in order, counted from the end of the old prefix:
  # those of verified tokens, then those of surviving nodes, then zeros.
  path: jax.Array
  # i32[B] rows that join the prefix: `num_tokens`, or less if the last accepted
  # tokens were not expanded; one less at most, unless they are a chain's. They
  # then have to be forwarded before the new root.
  num_committed: jax.Array


def reroot(
  tree: state.DraftTree, token_ids: jax.Array, num_tokens: jax.Array
) -> tuple[state.DraftTree, Reroot]:
  """Follows a verdict from the root down.

  The walk goes by tokens, not by the indices of a selection: the tree may have
  grown since that was sent. After a hit the new root's subtree stays,
  candidates included, with weights and depths counted from the new root. After
  a miss or a late hit the tree is the new root alone, a candidate. What a text
  added below a late hit goes, too: the text finds it again, after a longer
  match.

  Args:
    tree: tree that the verified selection is from.
    token_ids: i32[B, T] accepted tokens, then the next one, then anything.
    num_tokens: i32[B] number of tokens that count. A row with none stays as it
      is.
  """
  path = descend(tree, token_ids)
  path = jnp.concatenate(
    [jnp.full_like(path[:, :1], state.ROOT_INDEX), path], axis=1
  )
  slots = arrays.take(tree.nodes.cache_slots, path)
  slots = jnp.where(path == state.NO_NODE, state.NO_SLOT, slots)
  root = arrays.take(path, num_tokens[:, None])
  root_slot = arrays.take(slots, num_tokens[:, None])
  is_found = root[:, 0] != state.NO_NODE
  is_hit = root_slot[:, 0] != state.NO_SLOT
  is_committed = slots != state.NO_SLOT
  is_committed &= jnp.arange(path.shape[1])[None] < num_tokens[:, None]
  sees_root = arrays.take(tree.row_mask, root_slot[:, :, None], axis=2)
  is_surviving = sees_root[:, :, 0] & is_hit[:, None]

  last = arrays.take(token_ids, num_tokens[:, None] - 1)[:, 0]
  fresh = state.new_tree(
    jnp.where(num_tokens > 0, last, tree.root_token_ids),
    capacity=tree.capacity,
    num_cache_rows=tree.num_cache_rows,
    chain_length=tree.chain_length,
  )
  num_committed = arrays.count(is_committed)
  survivors = arrays.indices_of(is_surviving, tree.num_cache_rows)
  subtree = _subtree(tree, root, is_surviving, survivors)
  rows = jnp.arange(tree.num_cache_rows)[None]
  places = rows - num_committed[:, None]
  result = Reroot(
    outcome=is_found.astype(jnp.int32) + is_hit.astype(jnp.int32),
    # What is above an expanded node is expanded, so the first ones are.
    path=jnp.where(
      places < 0, arrays.take(slots, rows), arrays.take(survivors, places)
    ),
    num_committed=num_committed,
  )
  return _choose(is_hit, subtree, fresh), result


def descend(tree: state.DraftTree, token_ids: jax.Array) -> jax.Array:
  """Returns i32[B, D], the nodes that texts after the root pass.

  They are NO_NODE from the first token on that has none.

  Args:
    tree: tree of N nodes.
    token_ids: i32[B, D].
  """

  def step(parents, token_ids):
    found = state.find_children(tree, parents[:, None], token_ids[:, None])
    return found[:, 0], found[:, 0]

  roots = jnp.full(token_ids.shape[:1], state.ROOT_INDEX)
  _, path = jax.lax.scan(step, roots, token_ids.T)
  return path.T


@jax.vmap
def _choose(condition, first, second):
  """The first tree's row where the condition bool[B] holds."""
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), first, second)


def _subtree(tree, root, is_surviving, survivors):
  """Keeps the nodes at and below the new root.

  Args:
    tree: tree of N nodes and M rows.
    root: i32[B, 1] an expanded node; for others the result means nothing.
    is_surviving: bool[B, M] the rows at and below the root.
    survivors: i32[B, M] their indices in order.
  """
  ranks = arrays.ranks(is_surviving)
  num_surviving = ranks[:, -1] + 1
  is_row = jnp.arange(tree.num_cache_rows)[None] < num_surviving[:, None]
  row_mask = arrays.take(tree.row_mask, survivors[:, :, None])
  row_mask = arrays.take(row_mask, survivors[:, None], axis=2)
  # Candidates go with the nearest row above them.
  slots = state.slots_above(tree)
  nodes, old_root = tree.nodes, tree.nodes_at(root)
  is_expanded = nodes.cache_slots != state.NO_SLOT
  is_kept = nodes.is_node & arrays.take(is_surviving, slots)
  nodes = nodes.replace(
    depths=nodes.depths - old_root.depths,
    log_probs=nodes.log_probs - old_root.log_probs,
    cache_slots=jnp.where(
      is_expanded, arrays.take(ranks, slots), state.NO_SLOT
    ),
  )
  tree = tree.replace(
    packed=nodes.pack(),
    row_mask=row_mask & is_row[:, :, None] & is_row[:, None],
    num_expanded=num_surviving,
  )
  return state.keep(tree, is_kept, tree.capacity)
