"""Forwards of a draft model over known tokens that its cache lacks.

Legend:
- R rows, N tokens, D forwards of a draft
- P pages, Z tokens of a page, C pages under the attention
- V vocabulary, V' tokens of it that the draft can propose
- H width of the features, E width of the draft
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import paged
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import target_forward
from swiftspec_jax.step.ragged_batch import RaggedBatch


@struct.dataclass(frozen=True, kw_only=True)
class DraftRows:
  """Rows that get a draft; padding has length 0."""

  slots: jax.Array  # i32[R]
  last: jax.Array  # i32[R] the last known token, among the N
  positions: jax.Array  # i32[R, D] after the last known token
  lengths: jax.Array  # i32[R]
  page_table: jax.Array  # i32[R, C]
  # i32[R] as `RaggedBatch.num_skipped`, None where the tables are whole.
  num_skipped: jax.Array | None
  texts: jax.Array | None  # i32[R, C * Z] known tokens, if drafts look at them


@struct.dataclass(frozen=True, kw_only=True)
class TargetFeatures:
  """What a draft reads of its target."""

  pages: jax.Array  # [P, Z, H] of `PagedCache`
  places: jax.Array  # i32[N] there of the token before each; P * Z for none


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def prefill(
  params: Params,
  cache: paged.PagedCache,
  batch: RaggedBatch,
  token_ids: jax.Array,
  features: TargetFeatures | None,
  *,
  config: ModelConfig,
) -> paged.PagedCache:
  """Reads known tokens, of which none is the last one of its row.

  Of the last layer the compiler leaves only what gives keys and values.

  Args:
    params: parameters of the draft.
    cache: donated.
    batch: rows and places of the tokens.
    token_ids: i32[N].
    features: None if the draft reads none.
    config: configuration of the draft; static.

  Returns:
    The cache.
  """
  return _forward(params, cache, batch, token_ids, features, config)[1]


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def first_logits(
  params: Params,
  cache: paged.PagedCache,
  batch: RaggedBatch,
  token_ids: jax.Array,
  features: TargetFeatures | None,
  rows: DraftRows,
  *,
  config: ModelConfig,
) -> tuple[paged.PagedCache, jax.Array, jax.Array]:
  """Reads the rest, up to the last known token of each row.

  Args:
    params: parameters of the draft.
    cache: same as in `prefill`.
    batch: same as in `prefill`.
    token_ids: same as in `prefill`.
    features: same as in `prefill`.
    rows: rows to draft for.
    config: configuration of the draft; static.

  Returns:
    The cache, hidden states [R, E] of the last tokens, and logits f32[R, V'] of
    the draft's output vocabulary, as `decoder.unembed`.
  """
  hidden, cache = _forward(params, cache, batch, token_ids, features, config)
  hidden = hidden[rows.last]
  return cache, hidden, decoder.unembed(params, config, hidden[None])[0]


def feed(
  params: Params,
  config: ModelConfig,
  cache: paged.PagedCache,
  token_ids: jax.Array,
  positions: jax.Array,
  is_fed: jax.Array,
  rows: DraftRows,
  features_before: jax.Array | None = None,
) -> tuple[jax.Array, paged.PagedCache, jax.Array]:
  """Feeds a token of each row.

  Args:
    params: parameters of the draft.
    config: configuration of the draft.
    cache: cache of the draft.
    token_ids: i32[R].
    positions: i32[R].
    is_fed: bool[R]; what is fed for other rows is written nowhere.
    rows: rows of the tokens.
    features_before: same as in `target_forward.forward`.

  Returns:
    Hidden states [R, E], the cache, and logits f32[R, V'].
  """
  index = jnp.arange(len(token_ids))
  places = positions
  if rows.num_skipped is not None:
    places = places - rows.num_skipped
  pages = rows.page_table[index, places // cache.page_size]
  places = pages * cache.page_size + places % cache.page_size
  batch = RaggedBatch(
    positions=positions,
    places=jnp.where(is_fed, places, cache.num_places),
    block_tokens=index[:, None],
    block_lengths=is_fed.astype(jnp.int32),
    block_pages=rows.page_table,
    block_places=index,
    num_skipped=rows.num_skipped,
    blocks_before=jnp.zeros_like(token_ids),
  )
  hidden, cache = target_forward.forward(
    params, config, token_ids, batch, cache, features_before, is_real=is_fed
  )
  return hidden, cache, decoder.unembed(params, config, hidden[None])[0]


def features_before(
  params: Params, config: ModelConfig, features: TargetFeatures
) -> jax.Array:
  """Returns what the draft reads with each token, [N, E]."""
  flat = features.pages.reshape(-1, features.pages.shape[-1])
  before = flat.at[features.places].get(mode='fill', fill_value=0)
  return decoder.project_features(params, config, before[None])[0]


def _forward(params, cache, batch, token_ids, features, config):
  """Returns hidden states [N, E] and the cache."""
  before = None
  if features is not None:
    before = features_before(params, config, features)
  is_real = batch.places < cache.num_places
  return target_forward.forward(
    params, config, token_ids, batch, cache, before, is_real=is_real
  )


def noise_of_outputs(
  params: Params, config: ModelConfig, noise: jax.Array | None
) -> jax.Array | None:
  """Returns the noise [..., V'] of the tokens that a draft proposes.

  Args:
    params: parameters of the draft.
    config: configuration of the draft.
    noise: [..., V]; None where all slots are greedy.
  """
  if noise is None:
    return None
  if config.output_vocab_size is None:
    return noise[..., : config.num_logits]
  return noise[..., params['output_token_ids']]
