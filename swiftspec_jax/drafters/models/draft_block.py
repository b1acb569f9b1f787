"""A draft model that drafts a block in one forward, for the rows of an engine.

DFlash (arXiv 2602.06036). The block is the last known token with masks after
it, which all see each other. What each layer sees of the text are keys and
values of the target's features; those stay in the pages of the draft, under the
numbers of the target's. Those of the block go to spare pages and are dropped.
The block is always whole, as in training, however few of its tokens are wanted.

Legend:
- R rows, r of them no padding, N tokens, b tokens of a block
- D places that are drafted for, V' tokens that the draft can propose
- P pages, Z tokens of one, C pages of a row, S spare ones of it
- H width of the features
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models.draft_forward import DraftRows
from swiftspec_jax.drafters.models.draft_places import (
  ChainOfPlaces,
  TreeOfPlaces,
)
from swiftspec_jax.drafters.models.model_drafter import ModelDrafter, Unread
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import paged
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import ragged_batch, target_forward
from swiftspec_jax.step.ragged_batch import RaggedBatch, StepSizes


@struct.dataclass(frozen=True, kw_only=True)
class Context:
  """Verified tokens whose features are read."""

  pages: jax.Array  # features of the target, [P, Z, H] of `PagedCache`
  positions: jax.Array  # i32[N]
  # i32[N] there, and in the draft's pages, whose number for none is larger.
  places: jax.Array


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def prefill(
  params: Params,
  cache: paged.PagedCache,
  context: Context,
  *,
  config: ModelConfig,
) -> paged.PagedCache:
  """Writes what the layers see of verified tokens.

  Args:
    params: parameters of the draft.
    cache: donated.
    context: tokens to read.
    config: configuration of the draft; static.
  """
  flat = context.pages.reshape(-1, context.pages.shape[-1])
  features = flat.at[context.places].get(mode='fill', fill_value=0)
  keys, values = decoder.keys_and_values(
    params, config, features[None], context.positions[None]
  )

  def written(pages, new):
    return paged.write(pages, new[0], context.places)

  return cache.replace(
    keys=list(map(written, cache.keys, keys)),
    values=list(map(written, cache.values, values)),
  )


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def block_logits(
  params: Params,
  cache: paged.PagedCache,
  context: Context,
  token_ids: jax.Array,
  rows: DraftRows,
  *,
  config: ModelConfig,
) -> tuple[paged.PagedCache, None, jax.Array]:
  """Reads the rest of the verified tokens, and runs a block of each row.

  Args:
    params: parameters of the draft.
    cache: donated.
    context: tokens that the cache lacks.
    token_ids: i32[R] last known tokens.
    rows: rows to draft for; the table of each ends in spare pages.
    config: configuration of the draft; static.

  Returns:
    The cache, None, and logits f32[R, D, V'] of the draft's output vocabulary.
  """
  cache = prefill(params, cache, context, config=config)
  hidden, cache = target_forward.forward(
    params,
    config,
    *_block(token_ids, rows, cache, config),
    cache,
  )
  hidden = hidden.reshape(len(token_ids), config.block.num_drafts + 1, -1)
  drafted = hidden[:, 1 : rows.positions.shape[1] + 1]
  return cache, None, decoder.unembed(params, config, drafted)


def _block(token_ids, rows, cache, config):
  """Returns the tokens i32[R * b] of blocks, and where they belong."""
  num_rows, size = len(token_ids), config.block.num_drafts + 1
  steps = jnp.arange(size, dtype=jnp.int32)[None]
  tokens = jnp.where(steps == 0, token_ids[:, None], config.block.mask_token_id)
  positions = jnp.maximum(rows.positions[:, :1] - 1, 0) + steps
  pages = jnp.take_along_axis(
    rows.page_table, positions // cache.page_size, axis=1
  )
  places = pages * cache.page_size + positions % cache.page_size
  is_row = rows.lengths > 0
  index = jnp.arange(num_rows * size, dtype=jnp.int32)
  batch = RaggedBatch(
    positions=positions.ravel(),
    places=jnp.where(is_row[:, None], places, cache.num_places).ravel(),
    block_tokens=index.reshape(num_rows, size),
    block_lengths=jnp.where(is_row, size, 0),
    block_pages=rows.page_table,
    block_places=index,
    block_mask=jnp.ones((num_rows, size, size), bool),
    blocks_before=jnp.zeros_like(token_ids),
  )
  return tokens.ravel(), batch


class _BlockForwards(ModelDrafter):
  """Forwards of blocks, whatever is made of their logits."""

  _first_program = staticmethod(block_logits)

  @property
  def _num_unread(self) -> int:
    return 1

  @property
  def _num_spare_pages(self) -> int:
    size = self._model.config.block.num_drafts + 1
    return -(-size // self._sizes.scheduler.page_size)

  def _prefill(self, unread: Unread) -> None:
    num_tokens = self._sizes.scheduler.buckets.max_query_tokens
    self.cache = self._call(
      prefill,
      self._model.params,
      self.cache,
      self._context(num_tokens, unread),
      config=self._model.config,
    )

  def _rows(
    self, sizes: StepSizes, unread: Unread, lengths: np.ndarray
  ) -> DraftRows:
    rows = super()._rows(sizes, unread, lengths)
    tables = self._with_spare_pages(rows.page_table, unread.ends - 1)
    return rows.replace(page_table=tables)

  def _fed(self, sizes: StepSizes, unread: Unread) -> tuple[Context, jax.Array]:
    # The last known token is a part of the block.
    known = dataclasses.replace(unread, counts=unread.counts - 1)
    last = unread.texts.token_ids[unread.slots, known.ends]
    last = self._argument(ragged_batch.padded(last, sizes.num_rows))
    return self._context(sizes.num_tokens, known), last

  def _context(self, num_tokens: int, unread: Unread) -> Context:
    rows = np.repeat(np.arange(len(unread.slots)), unread.counts)
    before = np.cumsum(unread.counts) - unread.counts
    positions = (unread.starts - before)[rows] + np.arange(len(rows))
    places = ragged_batch.places_of(
      unread.page_table,
      rows,
      positions,
      self.cache.page_size,
      self.cache.num_pages,
    )
    positions = ragged_batch.padded(positions, num_tokens)
    places = ragged_batch.padded(places, num_tokens, self.cache.num_places)
    positions, places = self._argument((positions, places))
    return Context(
      pages=self._target.features, positions=positions, places=places
    )

  def _with_spare_pages(
    self, page_table: np.ndarray, kv_lengths: np.ndarray
  ) -> np.ndarray:
    """Returns i32[R, C + S]: spare pages after those of i64[r] tokens."""
    num_spare, page_size = self._num_spare_pages, self.cache.page_size
    tables = np.pad(page_table, ((0, 0), (0, num_spare)))
    rows = np.arange(len(kv_lengths))[:, None]
    spare = np.arange(num_spare)[None]
    first = -(-kv_lengths // page_size)[:, None]
    tables[rows, first + spare] = (
      self._sizes.scheduler.num_pages + rows * num_spare + spare
    )
    return tables


class BlockChainDrafter(_BlockForwards, ChainOfPlaces):
  """Chains of blocks."""


class BlockTreeDrafter(_BlockForwards, TreeOfPlaces):
  """Trees of blocks."""
