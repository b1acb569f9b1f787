"""The model over a flat list of tokens, and a cache of pages or of rows.

Legend: N tokens, X blocks, W tokens of a block, M tokens whose logits are
wanted, D embed, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, products
from kernels_pallas.few_rows import api as few_rows_api
from kernels_pallas.fused_attention import api as fused_api
from kernels_pallas.fused_paged_attention import api as fused_paged_api
from kernels_pallas.paged_attention import api as paged_attention_api
from kernels_pallas.tree_attention import api as tree_attention_api
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import attention, decoder, layer_products, layers
from swiftspec_jax.models.cache import all_layers, dense, paged
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import ragged_batch
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import RaggedBatch, StepSizes

# The products of more are no work for kernels of few tokens.
_MOST_KERNEL_TOKENS = 128


# Pages that slots share, or a row for each slot.
Cache = paged.PagedCache | dense.KVCache


def init_cache(
  model: Model,
  sizes: ProgramSizes,
  feature_layers: tuple[int, ...] = (),
) -> Cache:
  """Returns an empty cache for a target.

  Args:
    model: target.
    sizes: declared.
    feature_layers: layers whose outputs are kept, as `paged.init` takes them.
  """
  config = sizes.scheduler
  if not sizes.has_rows:
    return paged.init(
      model.config,
      config.num_pages,
      config.page_size,
      model.dtype,
      model.mesh,
      feature_layers,
    )
  return dense.init(
    model.config,
    config.buckets.max_rows,
    sizes.row_capacity,
    model.dtype,
    model.mesh,
    feature_layers,
  )


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


def _trace(model: Model, sizes: ProgramSizes, flat: StepSizes) -> None:
  config = model.config

  def run(params, token_ids, features_before):
    cache = init_cache(model, sizes)
    counts, pages = jnp.ones(flat.num_rows, jnp.int32), None
    if not sizes.has_rows:
      shape = flat.num_rows, flat.context // sizes.scheduler.page_size
      pages = jnp.zeros(shape, jnp.int32)
    batch, *_ = ragged_batch.pack_tokens(flat, counts, counts, pages)
    if pages is not None:
      batch = batch.replace(places=batch.positions)
    return forward(params, config, token_ids, batch, cache, features_before)

  before = None
  if config.reads_features_before:
    shape = flat.num_tokens, config.hidden_dim
    before = jax.ShapeDtypeStruct(shape, model.dtype)
  token_ids = jax.ShapeDtypeStruct((flat.num_tokens,), jnp.int32)
  jax.eval_shape(run, model.params, token_ids, before)


def forward(
  params: Params,
  config: ModelConfig,
  token_ids: jax.Array,
  batch: RaggedBatch,
  cache: Cache,
  features_before: jax.Array | None = None,
  is_real: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
  """Runs the model over tokens and writes what the cache keeps of them.

  Args:
    params: parameters, laid out as `param_specs(config)` says.
    config: static configuration of the model.
    token_ids: i32[N].
    batch: rows and places of the tokens.
    cache: cache of all rows.
    features_before: [N, D], where the model reads features; same as in
      `decoder.run_layers`.
    is_real: bool[N] tokens that are no padding: kernels of CPUs do no work for
      the others. None for work on all.

  Returns:
    Hidden states [N, D] before the final norm, and the cache.
  """
  if not attention.is_native(config, cache.sharding.mesh):
    is_real = None
  seen_by = _visibility(config, batch, is_real)
  options = {
    'scale': decoder.query_scale(config),
    'implementation': config.kernels,
    'sharding': cache.sharding,
  }
  kept = list(zip(cache.keys, cache.values, strict=True))

  def write(pair, new):
    return _written(cache, pair, [x[0] for x in new], batch)

  def attend(queries, pair, sinks, *, kind):
    seen, window = seen_by(kind)
    attended = _attend(
      cache,
      batch,
      batch.in_blocks(queries[0]),
      *pair,
      seen,
      sinks=sinks,
      window=window,
      **options,
    )
    return without_padding(batch.of_blocks(attended))[None]

  def attend_from_heads(heads_and_angles, pair, sinks, *, kind):
    seen, window = seen_by(kind)
    attended, *written = _attend_from_heads(
      cache,
      batch,
      [x[0] for x in heads_and_angles],
      *pair,
      seen,
      sinks=sinks,
      window=window,
      **options,
    )
    return without_padding(attended)[None], written

  def without_padding(attended):
    # It has the place of a real token in the blocks.
    if is_real is None or batch.block_places is None:
      return attended
    mask = is_real.reshape(-1, *[1] * (attended.ndim - 1))
    return jnp.where(mask, attended, 0)

  attend_fn, heads_fn = attention.over_layers(
    params,
    config,
    kept,
    kind_of=functools.partial(_kind, config),
    write=write,
    attend=attend,
    attend_from_heads=attend_from_heads,
  )
  features_before, is_real = jax.tree.map(
    lambda array: array[None], (features_before, is_real)
  )
  is_fused = _is_fused(config, batch, cache.sharding.mesh)
  hidden, features = decoder.run_layers(
    params,
    config,
    token_ids[None],
    batch.positions[None],
    attend_fn,
    attend_from_heads=heads_fn if is_fused else None,
    products=_products(len(token_ids), config, cache),
    features_before=features_before,
    feature_layers=cache.feature_layers,
    is_real=is_real,
  )
  cache = cache.replace(**all_layers.of_pairs(kept))
  if features is not None:
    cache = _with_features(cache, features[0], batch)
  return hidden[0], cache


def _kind(config, i):
  """Returns whether a layer has a window, and whether its blocks are chains."""
  is_causal = bool(config.block) and i in config.block.causal_layers
  return config.is_sliding(i), is_causal


def _visibility(config, batch, is_real):
  """Returns a function of a `_kind`: `seen` of `_attend`, and the window."""
  positions = batch.in_blocks(batch.positions)
  ends = layers.window_ends(positions, config)
  if batch.num_skipped is not None:
    # Among the pages that are there.
    positions -= batch.num_skipped[:, None]
    ends -= batch.num_skipped[:, None]

  def seen_by(kind):
    is_sliding, is_causal = kind
    mask, seen_from, window = batch.block_mask, positions, None
    if is_sliding:
      seen_from, window = ends, config.sliding_window
      if mask is not None:
        # The nodes of a tree do not lie at their positions.
        mask &= ends[:, :, None] - positions[:, None] < window
    elif config.hides_first_token:  # as in `decoder.forward_with_features`
      seen_from, window = jnp.ones_like(positions), 1
    if is_causal and mask is not None:
      mask &= jnp.tri(mask.shape[1], dtype=bool)[None]
    if is_real is not None and batch.block_pages is None:
      seen_from = jnp.where(batch.in_blocks(is_real), seen_from, -1)
    return (positions[:, 0], mask, seen_from), window

  return seen_by


def _with_features(cache, features, batch):
  """Returns the cache with features [N, H] of new tokens."""
  if isinstance(cache, paged.PagedCache):
    features = paged.write(cache.features, features, batch.places)
    return cache.replace(features=features)
  starts = _row_starts(cache, batch)
  return dense.write_features(cache, batch.in_blocks(features), starts)


def _written(cache, pair, new, batch):
  """Returns keys and values of a layer with those [N, G, E] of new tokens."""
  if isinstance(cache, paged.PagedCache):
    return [
      paged.write(x, y, batch.places, cache.page_size)
      for x, y in zip(pair, new, strict=True)
    ]
  starts = _row_starts(cache, batch)
  return [
    dense.write(x, batch.in_blocks(y), starts)
    for x, y in zip(pair, new, strict=True)
  ]


def _row_starts(cache, batch):
  """Returns i32[B] where slots write; those that feed nothing after texts."""
  first = batch.in_blocks(batch.positions)[:, 0]
  scratch = cache.capacity - batch.block_size
  return jnp.where(batch.block_lengths > 0, first, scratch)


def _attend(
  cache, batch, queries, keys, values, seen, *, implementation, **options
):
  """Returns what queries [X, W, ...] read of a layer's keys and values.

  Prefixes i32[X], mask and positions are `seen`; options are those of kernels.
  """
  if batch.block_pages is None:
    # Wide blocks are chunks of prompts, as in `decoder.forward_with_features`.
    if batch.block_size > _MOST_KERNEL_TOKENS:
      implementation = few_rows_api.usable_on(
        cache.sharding.mesh, implementation
      )
    return tree_attention_api.tree_attention(
      queries, keys, values, *seen, implementation=implementation, **options
    )
  prefix_lengths, mask, positions = seen
  return paged_attention_api.paged_attention(
    queries,
    keys,
    values,
    batch.block_pages,
    prefix_lengths,
    batch.block_lengths,
    mask,
    positions,
    page_size=cache.page_size,
    is_one_row=batch.is_one_row,
    implementation=implementation,
    **options,
  )


def _is_fused(config, batch, mesh) -> bool:
  """Whether rotation and write belong to attention."""
  if attention.is_native(config, mesh):
    return True
  if not attention.rotates_alone(config):
    return False
  if len(batch.positions) > _MOST_KERNEL_TOKENS:
    return False
  # Not over rows, where the kernel would sum in another order in a tree.
  return batch.blocks_before is not None and sharding.sequence_devices(mesh) < 2


def _attend_from_heads(cache, batch, tokens, keys, values, seen, **options):
  """Returns what new tokens [N, ...] read, and keys and values with them.

  Heads, cosines and sines are `tokens`; the rest as in `_attend`.
  """
  if batch.block_pages is None:
    attended, *written = fused_api.fused_attention(
      *map(batch.in_blocks, tokens),
      keys,
      values,
      _row_starts(cache, batch),
      *seen,
      **options,
    )
    return batch.of_blocks(attended), *written
  prefix_lengths, mask, positions = seen
  index = jnp.arange(len(batch.positions), dtype=jnp.int32)
  is_in_order = batch.block_places is None
  return fused_paged_api.fused_paged_attention(
    *tokens,
    keys,
    values,
    batch.places,
    batch.in_blocks(index),
    index if is_in_order else batch.block_places,
    batch.blocks_before,
    batch.block_pages,
    prefix_lengths,
    batch.block_lengths,
    mask,
    positions,
    is_one_row=batch.is_one_row,
    **options,
  )


def _products(num_tokens, config, cache) -> layer_products.Products:
  if num_tokens > _MOST_KERNEL_TOKENS:
    return layer_products.PLAIN
  return layer_products.on_devices(cache.sharding, config.kernels)


def logits_of(
  params: Params, config: ModelConfig, hidden: jax.Array
) -> jax.Array:
  """Returns logits f32[M, V] of hidden states [M, D]."""
  logits = decoder.unembed(params, config, hidden[None])
  logits = decoder.widen_logits(params, config, logits)[0]
  return products.apart(logits)
