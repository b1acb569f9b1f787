"""The tree as a struct of arrays; the package says what the letters mean."""

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax import errors
from swiftspec_jax.tree import arrays, types

ROOT_INDEX = 0
NO_NODE = NO_SLOT = -1
EMPTY, CANDIDATE, EXPANDED = range(3)  # status of a node


@struct.dataclass(frozen=True, kw_only=True)
class Nodes:
  """What is known of nodes [B, any]."""

  token_ids: jax.Array  # i32
  parents: jax.Array  # i32
  depths: jax.Array  # i32; 0 for the root
  # f32 sum from the root: the weight of the node; -inf where there is none.
  log_probs: jax.Array
  # i32 row of the draft's cache, counted from the end of the prefix; NO_SLOT
  # for candidates.
  cache_slots: jax.Array
  is_looked_up: jax.Array  # bool; came of a text first, not of the draft

  def pack(self) -> jax.Array:
    """Returns i32[B, any, 6], which moves in one piece."""
    bits = jax.lax.bitcast_convert_type(self.log_probs, jnp.int32)
    fields = jax.tree.leaves(self.replace(log_probs=bits))
    return jnp.stack([x.astype(jnp.int32) for x in fields], axis=2)

  @classmethod
  def unpack(cls, packed: jax.Array) -> 'Nodes':
    fields = [packed[:, :, i] for i in range(packed.shape[2])]
    nodes = jax.tree.unflatten(jax.tree.structure(_empty()), fields)
    log_probs = jax.lax.bitcast_convert_type(nodes.log_probs, jnp.float32)
    return nodes.replace(
      log_probs=log_probs, is_looked_up=nodes.is_looked_up != 0
    )

  @property
  def is_node(self) -> jax.Array:
    """bool[B, any], False for empty places."""
    return self.log_probs > -jnp.inf


def _empty():
  """Returns what an empty place holds."""
  return Nodes(
    token_ids=types.PLACEHOLDER_TOKEN_ID,
    parents=types.NO_PARENT,
    depths=0,
    log_probs=-jnp.inf,
    cache_slots=NO_SLOT,
    is_looked_up=False,
  )


@struct.dataclass(frozen=True, kw_only=True)
class DraftTree:
  """One tree for each row; places from `size` on are empty."""

  packed: jax.Array  # i32[B, N, 6] the packed `Nodes`
  # bool[B, M, M] which rows the node of a row sees: its ancestors' and its
  # own. Kept, because it costs one lookup for each new row; to derive it from
  # the parents takes log2(N) passes over the tree in each expansion.
  row_mask: jax.Array
  size: jax.Array  # i32[B] nodes
  num_expanded: jax.Array  # i32[B] also the first free row of the cache
  # Most candidates one below the other; 1 if all nodes come of `expand`.
  chain_length: int = struct.field(pytree_node=False, default=1)

  @property
  def nodes(self) -> Nodes:
    """The nodes [B, N]."""
    return Nodes.unpack(self.packed)

  def nodes_at(self, indices: jax.Array) -> Nodes:
    """Returns the nodes i32[B, any]."""
    return Nodes.unpack(arrays.take(self.packed, indices[:, :, None]))

  @property
  def root_token_ids(self) -> jax.Array:
    """i32[B]."""
    return self.nodes.token_ids[:, ROOT_INDEX]

  @property
  def capacity(self) -> int:
    """N."""
    return self.packed.shape[1]

  @property
  def num_cache_rows(self) -> int:
    """M."""
    return self.row_mask.shape[1]

  @property
  def status(self) -> jax.Array:
    """i32[B, N]: EMPTY, CANDIDATE or EXPANDED."""
    nodes = self.nodes
    status = jnp.where(nodes.cache_slots == NO_SLOT, CANDIDATE, EXPANDED)
    return jnp.where(nodes.is_node, status, EMPTY)


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
      `add_chain` will add; 1 if it is not used.

  Raises:
    UserError: if the sizes make no sense.
  """
  if not 1 <= num_cache_rows <= capacity:
    raise errors.UserError(
      f'num_cache_rows must be from 1 to the capacity of {capacity} nodes, '
      f'got {num_cache_rows}'
    )
  batch_size = root_token_ids.shape[0]
  empty = _empty()
  root = empty.replace(token_ids=root_token_ids[:, None], log_probs=0.0)
  is_root = jnp.arange(capacity)[None] == ROOT_INDEX
  nodes = jax.tree.map(
    lambda root, empty: jnp.broadcast_to(
      jnp.where(is_root, root, empty), (batch_size, capacity)
    ),
    root,
    empty,
  )
  return DraftTree(
    packed=nodes.pack(),
    row_mask=jnp.zeros((batch_size, num_cache_rows, num_cache_rows), bool),
    size=jnp.ones(batch_size, jnp.int32),
    num_expanded=jnp.zeros(batch_size, jnp.int32),
    chain_length=chain_length,
  )


def path_sums(tree: DraftTree, values: jax.Array) -> jax.Array:
  """Returns f32[B, N], the sum of the values of a node and all nodes above it.

  Args:
    tree: tree that may have more places than its capacity.
    values: f32[B, N].
  """
  nodes = tree.nodes
  owners = arrays.places_in(nodes.cache_slots, tree.num_cache_rows)
  row_values = jnp.where(owners == NO_NODE, 0.0, arrays.take(values, owners))
  row_sums = arrays.sums_where(tree.row_mask, row_values)
  parent_slots = arrays.take(nodes.cache_slots, nodes.parents)
  has_parent = nodes.parents != types.NO_PARENT
  has_row_above = has_parent & (parent_slots != NO_SLOT)
  sums = values + jnp.where(
    has_row_above, arrays.take(row_sums, parent_slots), 0.0
  )
  # Candidates below candidates.
  jumps = jnp.where(has_row_above, types.NO_PARENT, nodes.parents)
  for _ in range(_num_doublings(tree)):
    is_done = jumps == types.NO_PARENT
    sums += jnp.where(is_done, 0.0, arrays.take(sums, jumps))
    jumps = jnp.where(is_done, types.NO_PARENT, arrays.take(jumps, jumps))
  return sums


def find_children(
  tree: DraftTree, parents: jax.Array, token_ids: jax.Array
) -> jax.Array:
  """Returns the nodes i32[B, X] with these parents and tokens, or NO_NODE.

  Args:
    tree: tree of N nodes.
    parents: i32[B, X]; NO_NODE has no children.
    token_ids: i32[B, X].
  """
  nodes = tree.nodes
  is_child = nodes.parents[:, None] == parents[:, :, None]
  is_child &= nodes.token_ids[:, None] == token_ids[:, :, None]
  return arrays.last_of(is_child & (parents != NO_NODE)[:, :, None])


def slots_above(tree: DraftTree) -> jax.Array:
  """Returns i32[B, N], the row of a node or of the nearest that has one above.

  It is NO_SLOT if there is none.
  """
  nodes = tree.nodes
  is_end = (nodes.cache_slots != NO_SLOT) | (nodes.parents == types.NO_PARENT)
  jumps = jnp.where(is_end, jnp.arange(tree.capacity)[None], nodes.parents)
  for _ in range(_num_doublings(tree)):
    jumps = arrays.take(jumps, jumps)
  return arrays.take(nodes.cache_slots, jumps)


def _num_doublings(tree):
  return (tree.chain_length - 1).bit_length()


def keep(tree: DraftTree, is_kept: jax.Array, capacity: int) -> DraftTree:
  """Moves the kept nodes to the front, in order, and drops the others.

  Args:
    tree: tree that may have more places than the capacity.
    is_kept: bool[B, places], at most `capacity` True in a row.
    capacity: N of the result.

  Returns:
    The tree; a kept node whose parent goes is a root.
  """
  ranks = arrays.ranks(is_kept)
  size = ranks[:, -1] + 1
  sources = arrays.indices_of(is_kept, capacity)
  nodes = tree.nodes_at(sources)
  new_parents = arrays.take(
    jnp.where(is_kept, ranks, types.NO_PARENT), nodes.parents
  )
  has_parent = nodes.parents != types.NO_PARENT
  nodes = nodes.replace(
    parents=jnp.where(has_parent, new_parents, types.NO_PARENT)
  )
  is_node = jnp.arange(capacity)[None] < size[:, None]
  nodes = jax.tree.map(lambda x, y: jnp.where(is_node, x, y), nodes, _empty())
  return tree.replace(packed=nodes.pack(), size=size)


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
  jumps = jnp.where(parents == types.NO_PARENT, nodes[None], parents)
  # Each turn doubles the path; not a loop, so that a GPU needs few launches.
  for _ in range((num_nodes - 1).bit_length()):
    mask |= arrays.take(mask, jumps[:, :, None])
    jumps = arrays.take(jumps, jumps)
  return mask
