"""The tokens of a step as one flat list, and where each belongs.

Matrix products take all tokens of a step together, whatever rows they belong
to. Attention takes blocks: a block is up to W tokens of one row, which read
the row's pages once. A row that decodes is one block, a chunk of a prompt
several, and in plain steps blocks have one token. So the shapes depend on the
declared sizes alone.

Where slots have rows of the cache, block i is that of slot i, whatever runs in
it, and wide enough for all tokens that a row feeds. Then attention needs no
pages, and no tokens out of order unless there are chunks beside other rows.

Legend: R rows, N tokens, X blocks, W tokens of a block, C pages under the
attention, Z tokens of a page.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
  """What a program is compiled for.

  Attributes:
    num_rows: R.
    num_tokens: N.
    block_size: W.
    context: tokens under the attention, a multiple of the page size.
    has_draft_blocks: whether each block is of a slot that feeds its last known
      token and its draft.
    has_drafts: whether any row may feed a draft. Without one it asks for the
      logits of a single token.
  """

  num_rows: int
  num_tokens: int
  block_size: int
  context: int
  has_draft_blocks: bool = False
  has_drafts: bool = True

  @property
  def num_blocks(self) -> int:
    """X, enough for any N tokens of R rows."""
    after = max(self.num_tokens - self.num_rows, 0)
    return min(self.num_rows, self.num_tokens) + after // self.block_size


@struct.dataclass(frozen=True, kw_only=True)
class RaggedBatch:
  """Where the tokens of a step belong."""

  positions: jax.Array  # i32[N] in their rows; 0 for padding
  # i32[N] page * Z + offset where keys and values go; after the last page
  # for padding. None where slots have rows.
  places: jax.Array | None
  # i32[X, W] of the N; padding stands for any. None if N is X * W, and a token
  # has the same place in both.
  block_tokens: jax.Array | None
  block_lengths: jax.Array  # i32[X] tokens that are no padding
  # i32[X, C] of the rows, in order; negative where there is none. None where
  # slots have rows.
  block_pages: jax.Array | None
  block_places: jax.Array | None  # i32[N] of the X * W; None as `block_tokens`
  # bool[X, W, W] which tokens of its block a token sees, besides all in front
  # of the block; None where blocks are chains.
  block_mask: jax.Array | None = None
  # i32[X] tokens of the row whose pages are left out of the middle of
  # `block_pages`; None where there are none.
  num_skipped: jax.Array | None = None
  # Whether all blocks are of the same row, one after the other.
  is_one_row: bool = struct.field(pytree_node=False, default=False)
  # i32[X] blocks right in front with tokens of the same row; 0 for padding.
  # None where such blocks may lie elsewhere, and where slots have rows.
  blocks_before: jax.Array | None = None

  @property
  def block_size(self) -> int:
    """W."""
    if self.block_tokens is None:
      return len(self.positions) // len(self.block_lengths)
    return self.block_tokens.shape[1]

  def in_blocks(self, values: jax.Array) -> jax.Array:
    """Returns [X, W, ...] of [N, ...]."""
    if self.block_tokens is not None:
      return values[self.block_tokens]
    shape = len(self.block_lengths), self.block_size, *values.shape[1:]
    return values.reshape(shape)

  def of_blocks(self, values: jax.Array) -> jax.Array:
    """Returns [N, ...] of [X, W, ...]."""
    values = values.reshape(-1, *values.shape[2:])
    return values if self.block_places is None else values[self.block_places]


def pack(
  sizes: StepSizes,
  starts: np.ndarray,
  num_tokens: np.ndarray,
  page_table: np.ndarray,
  page_size: int,
  num_pages: int,
) -> RaggedBatch:
  """Returns host arrays for the next tokens of some rows, row after row.

  Args:
    sizes: sizes that the batch is padded to.
    starts: i64[r] position of the first token of each row.
    num_tokens: i64[r] of each row, at least 1.
    page_table: i32[r, any] of the rows.
    page_size: Z.
    num_pages: number of pages of the cache.
  """
  total, width = int(num_tokens.sum()), sizes.block_size
  rows = np.repeat(np.arange(len(starts)), num_tokens)
  index = np.arange(total) - _before(num_tokens)[rows]
  own = starts[rows] + index
  num_blocks = -(-num_tokens // width)
  blocks = _before(num_blocks)[rows] + index // width
  places = places_of(page_table, rows, own, page_size, num_pages)
  block_tokens = np.zeros((sizes.num_blocks, width), np.int32)
  block_tokens[blocks, index % width] = np.arange(total)
  block_lengths = np.bincount(blocks, minlength=sizes.num_blocks)
  # No longer than the context, which may be more than a row can have.
  num_columns = min(sizes.context // page_size, page_table.shape[1])
  block_pages = np.zeros(
    (sizes.num_blocks, sizes.context // page_size), np.int32
  )
  block_rows = np.repeat(np.arange(len(starts)), num_blocks)
  blocks_before = np.arange(len(block_rows)) - _before(num_blocks)[block_rows]
  block_pages[: len(block_rows), :num_columns] = page_table[
    block_rows, :num_columns
  ]
  return RaggedBatch(
    positions=padded(own, sizes.num_tokens),
    places=padded(places, sizes.num_tokens, num_pages * page_size),
    block_tokens=block_tokens,
    block_lengths=block_lengths.astype(np.int32),
    block_pages=block_pages,
    block_places=padded(blocks * width + index % width, sizes.num_tokens),
    blocks_before=padded(blocks_before, sizes.num_blocks),
  )


@struct.dataclass(frozen=True, kw_only=True)
class Unfolded:
  """Rows of different lengths one after another."""

  rows: jax.Array  # i32[n] of each item; padding has any
  index: jax.Array  # i32[n] in its row
  is_real: jax.Array  # bool[n]: False for padding


def unfold(counts: jax.Array, size: int) -> Unfolded:
  """Returns the items of all rows as one list, row after row.

  Args:
    counts: i32[R] items of each row.
    size: n, at least all items together; static.
  """
  ends, items = jnp.cumsum(counts), jnp.arange(size, dtype=jnp.int32)
  rows = jnp.sum(items[:, None] >= ends[None], axis=1, dtype=jnp.int32)
  rows = jnp.minimum(rows, len(counts) - 1)
  return Unfolded(
    rows=rows, index=items - (ends - counts)[rows], is_real=items < ends[-1]
  )


def pack_tokens(
  sizes: StepSizes,
  starts: jax.Array,
  counts: jax.Array,
  pages: jax.Array | None,
) -> tuple[RaggedBatch, Unfolded, jax.Array]:
  """Does on the devices what `pack` does, but for `RaggedBatch.places`.

  Args:
    sizes: sizes of the program; static.
    starts: i32[R] position of the first token of each row.
    counts: i32[R] tokens of each row; 0 for padding.
    pages: i32[R, C] of the rows; None where slots have rows, of which none has
      more than W tokens.

  Returns:
    The batch, its N tokens, and i32[R] the first one of each row.
  """
  has_rows = pages is None
  num_rows, width = len(counts), sizes.block_size
  block_tokens = block_places = block_pages = blocks_before = None
  # A block for each row. Pages have such ones in plain steps.
  is_plain = has_rows or width == 1
  if is_plain and sizes.num_tokens == num_rows * width:
    first = jnp.arange(num_rows, dtype=jnp.int32) * width
    rows, index = jnp.divmod(jnp.arange(sizes.num_tokens), width)
    tokens = Unfolded(rows=rows, index=index, is_real=index < counts[rows])
    block_lengths = counts
    if not has_rows:
      block_pages, blocks_before = pages, jnp.zeros_like(counts)
  else:
    first = jnp.cumsum(counts) - counts
    tokens = unfold(counts, sizes.num_tokens)
    num_blocks = jnp.ones_like(counts) if has_rows else -(-counts // width)
    blocks = unfold(num_blocks, num_rows if has_rows else sizes.num_blocks)
    done = blocks.index * width
    block_lengths = jnp.clip(counts[blocks.rows] - done, 0, width)
    block_lengths = jnp.where(blocks.is_real, block_lengths, 0)
    block_tokens = (first[blocks.rows] + done)[:, None]
    block_tokens = block_tokens + jnp.arange(width)[None]
    block_tokens = jnp.minimum(block_tokens, sizes.num_tokens - 1)
    before = jnp.cumsum(num_blocks) - num_blocks
    block_places = before[tokens.rows] * width + tokens.index
    block_places = jnp.where(tokens.is_real, block_places, 0)
    if not has_rows:
      block_pages = pages[blocks.rows]
      blocks_before = jnp.where(blocks.is_real, blocks.index, 0)
  positions = jnp.where(tokens.is_real, starts[tokens.rows] + tokens.index, 0)
  batch = RaggedBatch(
    positions=positions,
    places=None,
    block_tokens=block_tokens,
    block_lengths=block_lengths,
    block_pages=block_pages,
    block_places=block_places,
    is_one_row=num_rows == 1,
    blocks_before=blocks_before,
  )
  return batch, tokens, first


def places_of(
  page_table: np.ndarray,
  rows: np.ndarray,
  positions: np.ndarray,
  page_size: int,
  num_pages: int,
) -> np.ndarray:
  """Returns i64[n] as `RaggedBatch.places`; that of position -1 is none.

  Args:
    page_table: i32[r, any] of rows.
    rows: i64[n].
    positions: i64[n].
    page_size: Z.
    num_pages: number of pages of the cache.
  """
  pages = page_table[rows, positions // page_size]
  places = pages * page_size + positions % page_size
  return np.where(positions < 0, num_pages * page_size, places)


def padded(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
  """Returns i32[size, ...] of i64[r, ...], with `fill` after them."""
  found = np.full((size, *values.shape[1:]), fill, np.int32)
  found[: len(values)] = values
  return found


def _before(counts: np.ndarray) -> np.ndarray:
  """Returns the sum of the counts in front of each."""
  return np.cumsum(counts) - counts
