"""From the plan of a step to what the target is fed.

The host says which rows run, and how many tokens each feeds. The devices know
the texts to their ends, and lay the tokens out.

Legend:
- R rows of the program, N tokens, M queries
- B slots, K longest draft, T = K + 1, or 1 in a plain step
- C pages of a row under the attention
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax.models.cache import dense
from swiftspec_jax.scheduling.page_table import NO_PAGE
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.step import ragged_batch, verify
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import RaggedBatch, StepSizes
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_trees import SlotTrees
from swiftspec_jax.step.target_forward import Cache

_AT_THE_END = -1  # start of rows that decode: the devices know where that is


@struct.dataclass(frozen=True, kw_only=True)
class PlacedStep:
  """The tokens of a step, where the rows are."""

  batch: RaggedBatch
  slots: jax.Array  # i32[N]; B for padding
  token_ids: jax.Array  # i32[N] that are fed
  query_index: jax.Array  # i32[M]
  is_query: jax.Array  # bool[M]: False for padding
  queries: verify.Queries
  # i32[B, T] places of nodes before they are moved: `RaggedBatch.places`, or
  # positions where slots have rows. None without trees.
  node_places: jax.Array | None


class _Fed(NamedTuple):
  """What leads the rows of a packed step, i32[R] each."""

  slots: jax.Array  # B for padding
  starts: jax.Array
  counts: jax.Array  # tokens; 0 for padding
  lengths: jax.Array  # draft tokens among them
  is_sampled: jax.Array  # whether the row emits a token


NUM_COUNTS = len(_Fed._fields)  # of a row, in front of its pages


def pack(
  sizes: ProgramSizes,
  flat: StepSizes,
  step: StepPlan,
  page_table: np.ndarray,
) -> np.ndarray:
  """Returns a step as one array i32[R, 5 + C], as transfers cost the host time.

  Of each row what `_Fed` says, and its pages. C is 0 where slots have rows,
  which then stand in the order of the slots.

  Args:
    sizes: declared.
    flat: sizes of the program that runs it, at least its own `flat_sizes`.
    step: step that it runs.
    page_table: i32[B, any].
  """
  config = sizes.scheduler
  starts = step.starts.copy()
  starts[: step.num_decoding] = _AT_THE_END
  fed = _Fed(
    slots=step.slots,
    starts=starts,
    counts=step.num_query_tokens,
    lengths=step.lengths,
    is_sampled=step.is_sampled,
  )
  rows, num_pages = step.slots, 0
  if not sizes.has_rows:
    rows = slice(len(step.slots))
    num_pages = flat.context // config.page_size
  packed = np.zeros((flat.num_rows, NUM_COUNTS + num_pages), np.int32)
  packed[:, 0] = config.buckets.max_rows
  packed[rows, :NUM_COUNTS] = np.array(fed).T
  if num_pages:
    # The context may be more than a row can have.
    pages = page_table[step.slots, :num_pages]
    packed[:, NUM_COUNTS:] = NO_PAGE
    packed[rows, NUM_COUNTS : NUM_COUNTS + pages.shape[1]] = pages
  return packed


def without_drafts(packed: jax.Array) -> jax.Array:
  """Returns a packed step whose rows feed one token each."""
  fed = _Fed(*packed[:, :NUM_COUNTS].T)
  fed = fed._replace(
    counts=jnp.minimum(fed.counts, 1), lengths=jnp.zeros_like(fed.lengths)
  )
  return packed.at[:, :NUM_COUNTS].set(jnp.stack(fed, axis=1))


def place(
  packed: jax.Array,
  rows: Rows,
  drafted: jax.Array | None,
  trees: SlotTrees | None,
  cache: Cache,
  *,
  flat: StepSizes,
  num_queries: int,
) -> PlacedStep:
  """Lays a step out where the rows are.

  Args:
    packed: i32[R, 5 + C] result of `pack`.
    rows: texts of the slots.
    drafted: i32[B, K]; None in steps without drafts.
    trees: trees of the drafts; None where they are chains, or none.
    cache: cache that the step writes.
    flat: same as in `pack`; static.
    num_queries: M; static.
  """
  fed = _Fed(*packed[:, :NUM_COUNTS].T)
  is_decoding = fed.starts == _AT_THE_END
  known = rows.lengths.at[fed.slots].get(mode='fill', fill_value=0)
  fed = fed._replace(starts=jnp.where(is_decoding, known - 1, fed.starts))
  pages = None
  if not isinstance(cache, dense.KVCache):
    pages = packed[:, NUM_COUNTS:]
  batch, tokens, first = ragged_batch.pack_tokens(
    flat, fed.starts, fed.counts, pages
  )
  if pages is not None:
    # An output goes no further than that, whatever is drafted for it.
    ends = rows.max_lengths.at[fed.slots].get(mode='fill', fill_value=0)
    ends = jnp.where(is_decoding, ends, fed.starts + fed.counts)
    batch = batch.replace(places=_places(batch, tokens, pages, ends, cache))
  num_slots, positions = len(rows.lengths), batch.positions
  slots = jnp.where(tokens.is_real, fed.slots[tokens.rows], num_slots)
  num_nodes = 1 if drafted is None else drafted.shape[1] + 1
  query_index, is_query, index = _asked(
    fed, tokens, first, flat, num_queries, num_nodes
  )
  by_slot = _by_slot(fed.slots, num_slots, has_rows=pages is None)
  index = by_slot(index)
  # The last token comes from the target.
  num_drafted = jnp.minimum(by_slot(fed.lengths), jnp.maximum(rows.room - 1, 0))
  token_ids = _token_ids(fed, tokens, slots, positions, rows, drafted)
  node_places = None
  if trees is not None:
    places = positions if batch.places is None else batch.places
    node_places = places[query_index[index]]
    batch = _place_nodes(batch, tokens, fed, slots, num_drafted, trees)
  return PlacedStep(
    batch=batch,
    slots=slots,
    token_ids=token_ids,
    query_index=query_index,
    is_query=is_query,
    queries=verify.Queries(
      slots=slots[query_index],
      positions=batch.positions[query_index][:, None] + 1,
      index=index,
      num_drafted=num_drafted,
      is_sampled=by_slot(fed.is_sampled) > 0,
      is_in_order=flat.has_draft_blocks,
    ),
    node_places=node_places,
  )


def _by_slot(slots, num_slots, *, has_rows):
  """Returns a function that brings i32[R, ...] of rows to the slots."""
  if has_rows:
    return lambda values: values  # in their order
  # One scatter; what is looked up there costs a GPU no launch of its own.
  none = jnp.full(num_slots, len(slots), jnp.int32)
  row = none.at[slots].set(jnp.arange(len(slots)), mode='drop')
  return lambda values: values.at[row].get(mode='fill', fill_value=0)


def _token_ids(fed, tokens, slots, positions, rows, drafted):
  """Returns i32[N] known tokens, and draft tokens after them."""
  token_ids = rows.token_ids.at[slots, positions].get(mode='fill', fill_value=0)
  if drafted is None or not drafted.size:
    return token_ids
  nodes = _nodes(fed, tokens)
  drafts = drafted.at[slots, jnp.maximum(nodes - 1, 0)].get(
    mode='fill', fill_value=0
  )
  return jnp.where(nodes > 0, drafts, token_ids)


def _nodes(fed, tokens):
  """Returns i32[N]: the last known token of a row is 0, its draft 1 and up."""
  return tokens.index - (fed.counts - 1 - fed.lengths)[tokens.rows]


def _asked(fed, tokens, first, flat, num_queries, num_nodes):
  """Returns the queries.

  These are i32[M] places among the tokens, bool[M] whether there is such a
  query, and i32[R, T] the queries of each row. A row that emits asks after its
  last known token and its draft. Rows begin at the tokens `first` i32[R].
  """
  counts = jnp.where(fed.is_sampled > 0, fed.lengths + 1, 0)
  begin = first + fed.counts - counts
  nodes = jnp.arange(num_nodes)[None]
  if num_queries == flat.num_tokens:  # room for all
    own = jnp.where(nodes < counts[:, None], begin[:, None] + nodes, 0)
    is_query = tokens.is_real & (
      tokens.index >= (fed.counts - counts)[tokens.rows]
    )
    return jnp.arange(num_queries), is_query, own
  asked = ragged_batch.unfold(counts, num_queries)
  index = begin[asked.rows] + asked.index
  own = (jnp.cumsum(counts) - counts)[:, None] + nodes
  return (
    jnp.where(asked.is_real, index, 0),
    asked.is_real,
    jnp.where(nodes < counts[:, None], own, 0),
  )


def _places(batch, tokens, pages, ends, cache):
  """Returns `RaggedBatch.places` of rows up to their `ends` i32[R]."""
  positions, size = batch.positions, cache.page_size
  page = pages.at[tokens.rows, positions // size].get(
    mode='fill', fill_value=NO_PAGE
  )
  is_kept = tokens.is_real & (positions < ends[tokens.rows]) & (page >= 0)
  return jnp.where(is_kept, page * size + positions % size, cache.num_places)


def _place_nodes(batch, tokens, fed, slots, num_drafted, trees):
  """Returns the batch with nodes, packed as chains, at their positions."""
  nodes, num_nodes = _nodes(fed, tokens), trees.depths.shape[1]

  def drafted_of(slots):
    return num_drafted.at[slots].get(mode='fill', fill_value=0)

  is_node = (
    (nodes >= 0) & (nodes <= drafted_of(slots)) & (drafted_of(slots) > 0)
  )
  depths = trees.depths[slots, jnp.clip(nodes, 0, num_nodes - 1)]
  positions = batch.positions - nodes + depths
  # A row and its draft are one block; all other blocks are chains.
  block_slots = fed.slots[batch.in_blocks(tokens.rows)[:, 0]]
  is_tree = (batch.block_lengths > 0) & (drafted_of(block_slots) > 0)
  width = batch.block_size
  mask = trees.ancestor_mask[block_slots, :width, :width]
  rest = width - mask.shape[1]
  mask = jnp.pad(mask, ((0, 0), (0, rest), (0, rest)))
  chains = jnp.tri(width, dtype=bool)[None]
  return batch.replace(
    positions=jnp.where(is_node, positions, batch.positions),
    block_mask=jnp.where(is_tree[:, None, None], mask, chains),
  )


def flat_sizes(sizes: ProgramSizes, step: StepPlan) -> StepSizes:
  """Returns the declared sizes for a step."""
  ends = step.starts + step.num_ahead + step.num_query_tokens
  longest = min(int(ends.max()), sizes.scheduler.max_context)
  if step.is_plain:
    return sizes.plain(step.padded_rows, longest)
  num_query_tokens = sizes.pad_query_tokens(
    step.num_query_tokens, has_prompts=not step.is_decoding
  )
  return sizes.mixed(step.padded_rows, num_query_tokens, longest)
