"""The model over a flat list of tokens and a paged cache.

Legend: N tokens, X blocks, W tokens of a block, M tokens whose logits are
wanted, D embed, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import dispatch
from kernels_pallas.paged_attention import api as attention_api
from swiftspec_jax import errors
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models import decoder, layers
from swiftspec_jax.models.params import Params
from swiftspec_jax.serving.compilation.program_sizes import ProgramSizes
from swiftspec_jax.serving.target import flat_batch
from swiftspec_jax.serving.target.flat_batch import FlatBatch, FlatSizes

# The products of more are no work for kernels of few tokens.
_MOST_KERNEL_TOKENS = 128


def check_kernels(model: Model, sizes: ProgramSizes) -> None:
  """Traces steps of a model that insists on kernels.

  Args:
    model: target, or draft.
    sizes: declared.

  Raises:
    UserError: the kernels cannot do one of the steps.
  """
  if model.config.kernels in ('auto', dispatch.REFERENCE):
    return
  plain, mixed = list(sizes.all_plain()), list(sizes.all_mixed())
  try:
    for flat in {plain[-1], *mixed[:1], *mixed[-1:]}:
      _trace(model, sizes, flat)
  except NotImplementedError as error:
    raise errors.UserError(
      f'an engine cannot run {model.name} with '
      f'kernels={model.config.kernels!r}: {error}; load it with '
      "kernels='auto' or 'reference'"
    ) from error


def _trace(model: Model, sizes: ProgramSizes, flat: FlatSizes) -> None:
  config, scheduler = model.config, sizes.scheduler
  num_pages, page_size = scheduler.num_pages, scheduler.page_size
  no_pages = np.zeros((1, 1), np.int32)
  batch = flat_batch.pack(
    flat, np.zeros(1, int), np.ones(1, int), no_pages, page_size, num_pages
  )

  def run(params, token_ids, batch, features_before):
    cache = paged.init(config, num_pages, page_size, model.dtype, model.mesh)
    return forward(params, config, token_ids, batch, cache, features_before)

  before = None
  if config.reads_features_before:
    shape = flat.num_tokens, config.hidden_dim
    before = jax.ShapeDtypeStruct(shape, model.dtype)
  token_ids = jax.ShapeDtypeStruct((flat.num_tokens,), jnp.int32)
  jax.eval_shape(run, model.params, token_ids, batch, before)


def forward(
  params: Params,
  config: ModelConfig,
  token_ids: jax.Array,
  batch: FlatBatch,
  cache: paged.PagedCache,
  features_before: jax.Array | None = None,
  images: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, paged.PagedCache]:
  """Runs the model over tokens and writes what the cache keeps of them.

  Args:
    params: parameters, laid out as `params.param_specs(config)` says.
    config: static configuration of the model.
    token_ids: i32[N].
    batch: rows and places of the tokens.
    cache: cache of all rows.
    features_before: [N, D], where the model reads features; same as in
      `decoder.run_layers`.
    images: embeddings [N, D] and bool[N], where prompts have images; same as in
      `decoder.run_layers`.

  Returns:
    Hidden states [N, D] before the final norm, and the cache.
  """
  positions = batch.positions[batch.block_tokens]
  ends = layers.window_ends(positions, config)
  if batch.num_skipped is not None:
    # Among the pages that are there.
    positions -= batch.num_skipped[:, None]
    ends -= batch.num_skipped[:, None]
  keys, values = [], []
  write = functools.partial(
    paged.write, places=batch.places, page_size=cache.page_size
  )

  def attend(i, queries, new_keys, new_values):
    keys.append(write(cache.keys[i], new_keys[0]))
    values.append(write(cache.values[i], new_values[0]))
    mask, seen_from, window = batch.block_mask, positions, None
    if config.is_sliding(i):
      seen_from, window = ends, config.sliding_window
      if mask is not None:
        # The nodes of a tree do not lie at their positions.
        mask &= ends[:, :, None] - positions[:, None] < window
    elif config.hides_first_token:  # as in `decoder.forward_with_features`
      seen_from, window = jnp.ones_like(positions), 1
    if config.block and i in config.block.causal_layers and mask is not None:
      mask &= jnp.tri(mask.shape[1], dtype=bool)[None]
    attended = attention_api.paged_attention(
      queries[0][batch.block_tokens],
      keys[i],
      values[i],
      batch.block_pages,
      positions[:, 0],
      batch.block_lengths,
      mask,
      seen_from,
      scale=decoder.query_scale(config),
      window=window,
      sinks=params['layers'][i].get('sinks'),
      page_size=cache.page_size,
      implementation=config.kernels,
      sharding=cache.sharding,
    )
    attended = attended.reshape(-1, *attended.shape[2:])
    return attended[batch.block_places][None]

  if features_before is not None:
    features_before = features_before[None]
  if images is not None:
    images = images[0][None], images[1][None]
  hidden, features = decoder.run_layers(
    params,
    config,
    token_ids[None],
    batch.positions[None],
    attend,
    products=_products(len(token_ids), config, cache),
    features_before=features_before,
    feature_layers=cache.feature_layers,
    images=images,
  )
  if features is not None:
    features = paged.write(cache.features, features[0], batch.places)
  return hidden[0], cache.replace(keys=keys, values=values, features=features)


def _products(num_tokens, config, cache) -> decoder.Products:
  if num_tokens > _MOST_KERNEL_TOKENS:
    return decoder.Products()
  return decoder.products_on(cache.sharding, config.kernels)


def logits_of(
  params: Params, config: ModelConfig, hidden: jax.Array
) -> jax.Array:
  """Returns logits f32[M, V] of hidden states [M, D]."""
  logits = decoder.unembed(params, config, hidden[None])
  return decoder.widen_logits(params, config, logits)[0]
