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
  num_surviving: jax.Array  # i32[B] expanded nodes of the new tree


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
  is_path = walk(tree, token_ids)
  is_root = is_path & (tree.depths == num_tokens[:, None])
  root = jnp.argmax(is_root, axis=1).astype(jnp.int32)[:, None]
  root_slot = arrays.take(tree.cache_slots, root)
  is_found = jnp.any(is_root, axis=1)
  is_hit = is_found & (root_slot[:, 0] != state.NO_SLOT)
  slots = tree.cache_slots
  is_committed = arrays.put(
    jnp.zeros(tree.row_mask.shape[:2], bool),
    slots,
    is_path & (tree.depths < num_tokens[:, None]),
    slots != state.NO_SLOT,
  )
  sees_root = arrays.take(tree.row_mask, root_slot[:, :, None], axis=2)
  sees_root = sees_root[:, :, 0]
  is_surviving = sees_root & is_hit[:, None]

  last = arrays.take(token_ids, num_tokens[:, None] - 1)[:, 0]
  old_root = tree.token_ids[:, state.ROOT_INDEX]
  fresh = state.new_tree(
    jnp.where(num_tokens > 0, last, old_root),
    capacity=tree.capacity,
    num_cache_rows=tree.num_cache_rows,
    chain_length=tree.chain_length,
  )
  num_committed = arrays.count(is_committed)
  committed = arrays.indices_of(is_committed, tree.num_cache_rows)
  survivors = arrays.indices_of(is_surviving, tree.num_cache_rows)
  places = jnp.arange(tree.num_cache_rows)[None] - num_committed[:, None]
  result = Reroot(
    outcome=is_found.astype(jnp.int32) + is_hit.astype(jnp.int32),
    path=jnp.where(places < 0, committed, arrays.take(survivors, places)),
    num_committed=num_committed,
    num_surviving=arrays.count(is_surviving),
  )
  subtree = _subtree(tree, root, is_surviving, survivors)
  return _choose(is_hit, subtree, fresh), result


def walk(tree: state.DraftTree, token_ids: jax.Array) -> jax.Array:
  """Returns bool[B, N], the nodes that a text i32[B, T] after the root passes.

  Those deeper than T mean nothing.
  """
  wanted = arrays.take(token_ids, tree.depths - 1)
  is_match = (tree.depths == 0) | (tree.token_ids == wanted)
  is_match &= tree.status != state.EMPTY
  return ~state.path_sums(tree, ~is_match)


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
  rows = jnp.arange(tree.num_cache_rows)[None]
  is_row = rows < arrays.count(is_surviving)[:, None]
  row_mask = arrays.take(tree.row_mask, survivors[:, :, None])
  row_mask = arrays.take(row_mask, survivors[:, None], axis=2)
  # Candidates go with the nearest row above them.
  is_expanded = tree.cache_slots != state.NO_SLOT
  slots = state.slots_above(tree)
  new_slots = arrays.take(arrays.ranks(is_surviving), slots)
  is_kept = (tree.status != state.EMPTY) & arrays.take(is_surviving, slots)
  tree = tree.replace(
    depths=tree.depths - arrays.take(tree.depths, root),
    log_probs=tree.log_probs - arrays.take(tree.log_probs, root),
    cache_slots=jnp.where(is_expanded, new_slots, state.NO_SLOT),
    row_mask=row_mask & is_row[:, :, None] & is_row[:, None],
  )
  return state.keep(tree, is_kept, tree.capacity)
