"""The tree as a struct of arrays; the package says what the letters mean."""

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax import errors, types
from swiftspec_jax.tree import arrays

ROOT_INDEX = 0
NO_NODE = NO_PARENT = NO_SLOT = -1
EMPTY, CANDIDATE, EXPANDED = range(3)  # status of a node


@struct.dataclass(frozen=True, kw_only=True)
class DraftTree:
  """One tree for each row; entries from `size` on are empty."""

  token_ids: jax.Array  # i32[B, N]
  parents: jax.Array  # i32[B, N]
  depths: jax.Array  # i32[B, N] 0 for the root
  log_probs: jax.Array  # f32[B, N] sum from the root: the weight of the node
  # i32[B, N] row of the draft's cache, counted from the end of the prefix;
  # NO_SLOT for candidates.
  cache_slots: jax.Array
  is_looked_up: jax.Array  # bool[B, N] came of a text first, not of the draft
  # bool[B, M, M] which rows the node of a row sees: its ancestors' and its
  # own. Kept, because it costs one lookup for each new row; to derive it from
  # the parents takes log2(N) passes over the tree in each expansion.
  row_mask: jax.Array
  size: jax.Array  # i32[B] nodes
  # Most candidates one below the other; 1 if all nodes come of `expand`.
  chain_length: int = struct.field(pytree_node=False, default=1)

  @property
  def capacity(self) -> int:
    """N."""
    return self.token_ids.shape[1]

  @property
  def num_cache_rows(self) -> int:
    """M."""
    return self.row_mask.shape[1]

  @property
  def status(self) -> jax.Array:
    """i32[B, N]: EMPTY, CANDIDATE or EXPANDED."""
    is_node = jnp.arange(self.capacity)[None] < self.size[:, None]
    status = jnp.where(self.cache_slots == NO_SLOT, CANDIDATE, EXPANDED)
    return jnp.where(is_node, status, EMPTY)

  @property
  def num_expanded(self) -> jax.Array:
    """i32[B]: also the first free row of the cache."""
    return arrays.count(self.status == EXPANDED)


def new_tree(
  root_token_ids: jax.Array,
  *,
  capacity: int,
  num_cache_rows: int,
  chain_length: int = 1,
) -> DraftTree:
  """Returns trees of a root alone, a candidate.

  Args:
    root_token_ids: i32[B] the last known tokens.
    capacity: N.
    num_cache_rows: M, the most nodes that can be expanded at a time. The cache
      needs M + W rows after the prefix.
    chain_length: one more than the tokens of the longest chain that
      `add_chains` will add; 1 if it is not used.

  Raises:
    UserError: if the sizes make no sense.
  """
  if not 1 <= num_cache_rows <= capacity:
    raise errors.UserError(
      f'num_cache_rows must be from 1 to the capacity of {capacity} nodes, '
      f'got {num_cache_rows}'
    )
  batch_size = root_token_ids.shape[0]
  shape = (batch_size, capacity)

  def nodes(root, fill, dtype):
    return jnp.full(shape, fill, dtype).at[:, ROOT_INDEX].set(root)

  return DraftTree(
    token_ids=nodes(root_token_ids, types.PLACEHOLDER_TOKEN_ID, jnp.int32),
    parents=jnp.full(shape, NO_PARENT, jnp.int32),
    depths=jnp.zeros(shape, jnp.int32),
    log_probs=nodes(0.0, -jnp.inf, jnp.float32),
    cache_slots=jnp.full(shape, NO_SLOT, jnp.int32),
    is_looked_up=jnp.zeros(shape, bool),
    row_mask=jnp.zeros((batch_size, num_cache_rows, num_cache_rows), bool),
    size=jnp.ones(batch_size, jnp.int32),
    chain_length=chain_length,
  )


def path_sums(tree: DraftTree, values: jax.Array) -> jax.Array:
  """Returns [B, N], the sum of the values of a node and all nodes above it.

  Args:
    tree: may have longer arrays of nodes than its capacity.
    values: [B, N]. Of flags the result is whether any is True.
  """
  is_flag = values.dtype == jnp.bool_
  total, add = (jnp.any, jnp.logical_or) if is_flag else (jnp.sum, jnp.add)
  slots, zero = tree.cache_slots, jnp.zeros((), values.dtype)
  rows = jnp.zeros(tree.row_mask.shape[:2], values.dtype)
  rows = arrays.put(rows, slots, values, slots != NO_SLOT)
  row_sums = total(jnp.where(tree.row_mask, rows[:, None], zero), axis=2)
  parent_slots = arrays.take(slots, tree.parents)
  has_parent = tree.parents != NO_PARENT
  has_row_above = has_parent & (parent_slots != NO_SLOT)
  above = jnp.where(has_row_above, arrays.take(row_sums, parent_slots), zero)
  sums = add(values, above)
  # Candidates below candidates.
  jumps = jnp.where(has_row_above, NO_PARENT, tree.parents)
  for _ in range(_num_doublings(tree)):
    is_done = jumps == NO_PARENT
    sums = add(sums, jnp.where(is_done, zero, arrays.take(sums, jumps)))
    jumps = jnp.where(is_done, NO_PARENT, arrays.take(jumps, jumps))
  return sums


def slots_above(tree: DraftTree) -> jax.Array:
  """Returns i32[B, N], the row of a node or of the nearest that has one above.

  It is NO_SLOT if there is none.
  """
  is_end = (tree.cache_slots != NO_SLOT) | (tree.parents == NO_PARENT)
  nodes = jnp.arange(tree.capacity)[None]
  jumps = jnp.where(is_end, nodes, tree.parents)
  for _ in range(_num_doublings(tree)):
    jumps = arrays.take(jumps, jumps)
  return arrays.take(tree.cache_slots, jumps)


def _num_doublings(tree):
  return (tree.chain_length - 1).bit_length()


def keep(tree: DraftTree, is_kept: jax.Array, capacity: int) -> DraftTree:
  """Moves the kept nodes to the front, in order, and drops the others.

  Args:
    tree: tree whose arrays of nodes may be longer than the capacity.
    is_kept: bool[B, length of the arrays], at most `capacity` True in a row.
    capacity: N of the result.

  Returns:
    The tree; a kept node whose parent goes is a root.
  """
  size = arrays.count(is_kept)
  is_node = jnp.arange(capacity)[None] < size[:, None]
  has_parent = (tree.parents != NO_PARENT) & arrays.take(is_kept, tree.parents)
  new_parents = arrays.take(arrays.ranks(is_kept), tree.parents)
  sources = arrays.indices_of(is_kept, capacity)

  def move(values, fill):
    return jnp.where(is_node, arrays.take(values, sources), fill)

  return tree.replace(
    token_ids=move(tree.token_ids, types.PLACEHOLDER_TOKEN_ID),
    parents=move(jnp.where(has_parent, new_parents, NO_PARENT), NO_PARENT),
    depths=move(tree.depths, 0),
    log_probs=move(tree.log_probs, -jnp.inf),
    cache_slots=move(tree.cache_slots, NO_SLOT),
    is_looked_up=move(tree.is_looked_up, False),
    size=size,
  )


def ancestor_mask(parents: jax.Array) -> jax.Array:
  """Returns which nodes a node sees: its ancestors and itself.

  Args:
    parents: i32[B, N] of a tree or of a selection. Nodes with NO_PARENT, roots
      and padding, see themselves alone.

  Returns:
    bool[B, N, N]; [b, i, j] says whether j is i or an ancestor of i.
  """
  num_nodes = parents.shape[1]
  nodes = jnp.arange(num_nodes)
  mask = jnp.broadcast_to(
    nodes[:, None] == nodes[None], (*parents.shape, num_nodes)
  )
  # A root jumps to itself, where it sees nothing new.
  jumps = jnp.where(parents == NO_PARENT, nodes[None], parents)
  # Each turn doubles the path; not a loop, so that a GPU needs few launches.
  for _ in range((num_nodes - 1).bit_length()):
    mask |= arrays.take(mask, jumps[:, :, None])
    jumps = arrays.take(jumps, jumps)
  return mask
