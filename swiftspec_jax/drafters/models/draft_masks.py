"""An EAGLE-3 head that drafts a block in one forward, for rows of an engine.

P-EAGLE: the head reads verified tokens with features of the target, as ever.
Masks stand after the last one, each with a learned feature before it, and the
last token and the masks draft the next token each. A mask sees what is in front
of it alone, so that no more masks are fed than are wanted. What they leave in
the pages is written over.

Legend: R rows, N tokens, X blocks, W tokens of a block, D places that are
drafted for, V' tokens that the draft can propose, E width of the draft.
"""

import functools

import jax
import jax.numpy as jnp

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models.draft_forward import (
  DraftRows,
  TargetFeatures,
  features_before,
)
from swiftspec_jax.drafters.models.draft_places import (
  ChainOfPlaces,
  TreeOfPlaces,
)
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import paged
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import target_forward
from swiftspec_jax.step.ragged_batch import RaggedBatch


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def logits_of_masks(
  params: Params,
  cache: paged.PagedCache,
  batch: RaggedBatch,
  token_ids: jax.Array,
  features: TargetFeatures,
  rows: DraftRows,
  *,
  config: ModelConfig,
) -> tuple[paged.PagedCache, None, jax.Array]:
  """Reads tokens up to the last known one of each row, and masks after them.

  Args:
    params: parameters of the draft.
    cache: donated.
    batch: rows and places of the known tokens.
    token_ids: i32[N].
    features: features of the target.
    rows: rows to draft for.
    config: configuration of the draft; static.

  Returns:
    The cache, None, and logits f32[R, D, V'] of the draft's output vocabulary.
  """
  num_rows, num_masks = len(rows.lengths), rows.positions.shape[1] - 1
  before = features_before(params, config, features)
  if num_masks:
    batch = _with_masks(batch, rows, cache, num_masks)
    masks = jnp.full(num_rows * num_masks, config.block.mask_token_id)
    token_ids = jnp.concatenate([token_ids, masks.astype(jnp.int32)])
    feature = decoder.project_features(
      params, config, params['mask_feature'][None, None]
    )[0]
    feature = jnp.broadcast_to(feature, (len(masks), feature.shape[1]))
    before = jnp.concatenate([before, feature])
  hidden, cache = target_forward.forward(
    params, config, token_ids, batch, cache, before
  )
  of_masks = hidden[len(hidden) - num_rows * num_masks :]
  of_masks = of_masks.reshape(num_rows, num_masks, hidden.shape[1])
  hidden = jnp.concatenate([hidden[rows.last][:, None], of_masks], axis=1)
  return cache, None, decoder.unembed(params, config, hidden)


def _with_masks(batch, rows, cache, num_masks):
  """Returns the batch with masks after its N tokens, a block of each row."""
  num_tokens = len(batch.positions)
  num_blocks, width = batch.block_tokens.shape
  num_rows = len(rows.lengths)
  steps = jnp.arange(num_masks, dtype=jnp.int32)[None]
  index = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
  positions = rows.positions[:, :1] + steps
  pages = jnp.take_along_axis(
    rows.page_table, positions // cache.page_size, axis=1
  )
  places = pages * cache.page_size + positions % cache.page_size
  # The last draft token needs no mask after the one that drafts it.
  num_fed = jnp.clip(rows.lengths - 1, 0, num_masks)
  tokens = num_tokens + index * num_masks + steps
  block_places = (num_blocks + index) * width + steps

  def after(known, new):
    return jnp.concatenate([known, new.reshape(-1, *known.shape[1:])])

  return batch.replace(
    positions=after(batch.positions, positions),
    places=after(
      batch.places,
      jnp.where(steps < num_fed[:, None], places, cache.num_places),
    ),
    block_tokens=after(
      batch.block_tokens,
      jnp.pad(tokens, ((0, 0), (0, width - num_masks)), mode='edge'),
    ),
    block_lengths=after(batch.block_lengths, num_fed),
    block_pages=after(batch.block_pages, rows.page_table),
    block_places=after(batch.block_places, block_places),
    blocks_before=None,  # masks see blocks of known tokens that lie elsewhere
  )


class MaskChainDrafter(ChainOfPlaces):
  """Chains of a head with masks."""

  _first_program = staticmethod(logits_of_masks)


class MaskTreeDrafter(TreeOfPlaces):
  """Trees of a head with masks."""

  _first_program = staticmethod(logits_of_masks)
