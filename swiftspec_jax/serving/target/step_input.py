"""From the plan of a step to what the target is fed.

The host packs it with the lengths that it has read. The devices know the texts
to their ends, and move the rows there.

Legend: N tokens, M queries, B slots, K longest draft, T = K + 1, or 1 in a
plain step, P pages, Z tokens of one.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax.serving.compilation.program_sizes import ProgramSizes
from swiftspec_jax.serving.drafters.slot_trees import SlotTrees
from swiftspec_jax.serving.scheduling.step_plan import StepPlan
from swiftspec_jax.serving.target import choices, flat_batch
from swiftspec_jax.serving.target.flat_batch import FlatBatch, FlatSizes
from swiftspec_jax.serving.target.row_state import RowState

_AS_PACKED = -1  # known tokens of slots whose positions are those of the host


@struct.dataclass(frozen=True, kw_only=True)
class StepInput:
  """Host arrays of a step."""

  batch: FlatBatch
  slots: jax.Array  # i32[N]; B for padding
  draft_index: jax.Array  # i32[N] of B * K draft tokens, -1 for known tokens
  query_index: jax.Array  # i32[M] queries, among the N tokens
  index: jax.Array  # i32[B, T] as in `Queries`
  # i32[B] tokens that the host knows of the rows that decode; -1 for others.
  num_known: jax.Array
  num_drafted: jax.Array  # i32[B] draft tokens to verify
  is_sampled: jax.Array  # bool[B] slots that emit tokens


@struct.dataclass(frozen=True, kw_only=True)
class PackedInput:
  """A `StepInput` in one array: each transfer costs the host as much."""

  values: jax.Array  # i32[any], those of all arrays
  tree: jax.tree_util.PyTreeDef = struct.field(pytree_node=False)
  # Shape and dtype of each.
  arrays: tuple[tuple[tuple[int, ...], np.dtype], ...] = struct.field(
    pytree_node=False
  )

  @classmethod
  def of(cls, step: StepInput) -> 'PackedInput':
    """Packs host arrays, i32 or bool."""
    arrays, tree = jax.tree.flatten(step)
    return cls(
      values=np.concatenate([x.ravel() for x in arrays], dtype=np.int32),
      tree=tree,
      arrays=tuple((x.shape, x.dtype) for x in arrays),
    )

  def unpack(self) -> StepInput:
    """Returns the arrays."""
    sizes = [math.prod(shape) for shape, _ in self.arrays]
    parts = jnp.split(self.values, np.cumsum(sizes)[:-1])
    arrays = [
      part.reshape(shape).astype(dtype)
      for part, (shape, dtype) in zip(parts, self.arrays, strict=True)
    ]
    return jax.tree.unflatten(self.tree, arrays)


@struct.dataclass(frozen=True, kw_only=True)
class PlacedStep:
  """The same where the rows are."""

  batch: FlatBatch
  slots: jax.Array  # i32[N]; B for padding
  token_ids: jax.Array  # i32[N] that are fed
  query_index: jax.Array  # i32[M]
  queries: choices.Queries
  # i32[B, T] places of nodes before they are moved: `FlatBatch.places`, or
  # positions where slots have rows.
  node_places: jax.Array


@functools.partial(jax.jit, static_argnames=('page_size', 'num_pages'))
def place(
  packed: PackedInput,
  rows: RowState,
  drafted: jax.Array,
  trees: SlotTrees | None,
  *,
  page_size: int,
  num_pages: int,
) -> PlacedStep:
  """Brings a step to where the rows are.

  Args:
    packed: step with the positions that the host knows.
    rows: texts of the slots.
    drafted: i32[B, K].
    trees: trees of the drafts; None where they are chains, or none.
    page_size: Z; static.
    num_pages: P; static.
  """
  step = packed.unpack()
  batch, slots = step.batch, step.slots

  def of_slot(values, fill=0):
    return values.at[slots].get(mode='fill', fill_value=fill)

  is_moved = step.num_known != _AS_PACKED
  shift = jnp.where(is_moved, rows.lengths - step.num_known, 0)
  positions = batch.positions + of_slot(shift)
  token_ids = rows.token_ids.at[slots, positions].get(mode='fill', fill_value=0)
  if drafted.size:
    drafts = drafted.reshape(-1)[jnp.maximum(step.draft_index, 0)]
    token_ids = jnp.where(step.draft_index >= 0, drafts, token_ids)
  places = None
  if batch.block_pages is not None:
    # What an output has no room for is written nowhere, and neither is padding.
    ends = jnp.where(is_moved, rows.max_lengths, jnp.iinfo(jnp.int32).max)
    blocks = batch.block_places // batch.block_size
    pages = batch.block_pages.at[blocks, positions // page_size].get(
      mode='fill', fill_value=-1
    )
    places = jnp.where(
      (positions < of_slot(ends)) & (pages >= 0),
      pages * page_size + positions % page_size,
      num_pages * page_size,
    )
  # The last token comes from the target.
  num_drafted = jnp.minimum(step.num_drafted, jnp.maximum(rows.room - 1, 0))
  queries = choices.Queries(
    slots=slots[step.query_index],
    positions=positions[step.query_index][:, None] + 1,
    index=step.index,
    num_drafted=num_drafted,
    is_sampled=step.is_sampled,
  )
  nodes = step.query_index[step.index]
  placed = PlacedStep(
    batch=batch.replace(positions=positions, places=places),
    slots=slots,
    token_ids=token_ids,
    query_index=step.query_index,
    queries=queries,
    node_places=(positions if places is None else places)[nodes],
  )
  return placed if trees is None else _place_nodes(placed, trees)


def _place_nodes(step: PlacedStep, trees: SlotTrees) -> PlacedStep:
  """Brings the nodes of trees, packed as chains, to their positions."""
  batch, queries = step.batch, step.queries
  tokens = step.query_index[queries.index]
  is_node = queries.is_node
  positions = batch.positions[tokens[:, :1]] + trees.depths

  def put(values, index, new):
    index = jnp.where(is_node, index, len(values))
    return values.at[index].set(new, mode='drop')

  num_blocks, width = len(batch.block_lengths), batch.block_size
  # A row and its draft are one block; all other blocks are chains.
  blocks = batch.blocks_of(tokens[:, 0])
  blocks = jnp.where(is_node[:, 0], blocks, num_blocks)
  mask = trees.ancestor_mask[:, :width, :width]
  rest = width - mask.shape[1]
  mask = jnp.pad(mask, ((0, 0), (0, rest), (0, rest)))
  chains = jnp.tri(width, dtype=bool)
  chains = jnp.broadcast_to(chains, (num_blocks, width, width))
  of_queries = put(queries.positions[:, 0], queries.index, positions + 1)
  return step.replace(
    batch=batch.replace(
      positions=put(batch.positions, tokens, positions),
      block_mask=chains.at[blocks].set(mask, mode='drop'),
    ),
    queries=queries.replace(positions=of_queries[:, None]),
  )


def pack(
  sizes: ProgramSizes,
  flat: FlatSizes,
  step: StepPlan,
  page_table: np.ndarray,
) -> StepInput:
  """Returns the input of a step.

  Args:
    sizes: declared.
    flat: sizes of the program that runs it, at least its own `flat_sizes`.
    step: step that it runs.
    page_table: i32[B, any].
  """
  counts, config = step.num_query_tokens, sizes.scheduler
  num_slots = config.buckets.max_rows
  rows = np.repeat(np.arange(len(counts)), counts)
  # Counted from the last known token: the root is 0, drafts are 1 and more.
  offsets = np.arange(len(rows)) - (np.cumsum(counts) - 1)[rows]
  offsets += step.lengths[rows]
  slots = step.slots[rows]
  draft_index = slots * config.buckets.max_length + offsets - 1
  is_query = step.is_sampled[rows] & (offsets >= 0)
  decoding = step.slots[: step.num_decoding]
  length = 0 if flat.block_size == 1 else config.buckets.max_length
  index = np.zeros((num_slots, length + 1), np.int32)
  index[slots[is_query], offsets[is_query]] = np.arange(is_query.sum())

  def by_slot(slots, values, fill):
    found = np.full(num_slots, fill, np.asarray(fill).dtype)
    found[slots] = values
    return found

  if sizes.has_rows:
    batch, order = flat_batch.pack_rows(flat, step.starts, counts, step.slots)
  else:
    order = np.arange(len(rows))
    batch = flat_batch.pack(
      flat,
      step.starts,
      counts,
      page_table[step.slots],
      config.page_size,
      config.num_pages,
    )
  return StepInput(
    batch=batch,
    slots=flat_batch.spread(slots, order, flat.num_tokens, num_slots),
    draft_index=flat_batch.spread(
      np.where(offsets > 0, draft_index, -1), order, flat.num_tokens, -1
    ),
    query_index=flat_batch.padded(order[is_query], sizes.num_logits(flat)),
    index=index,
    num_known=by_slot(
      decoding, step.starts[: len(decoding)] + 1, np.int32(_AS_PACKED)
    ),
    num_drafted=by_slot(step.slots, step.lengths, np.int32(0)),
    is_sampled=by_slot(step.slots, step.is_sampled, False),
  )


def flat_sizes(sizes: ProgramSizes, step: StepPlan) -> FlatSizes:
  """Returns the declared sizes for a step."""
  ends = step.starts + step.num_ahead + step.num_query_tokens
  longest = min(int(ends.max()), sizes.scheduler.max_context)
  if step.is_plain:
    return sizes.plain(step.padded_rows, longest)
  num_query_tokens = sizes.pad_query_tokens(step.num_query_tokens)
  return sizes.mixed(step.padded_rows, num_query_tokens, longest)
