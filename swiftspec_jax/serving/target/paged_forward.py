"""The model over a flat list of tokens and a paged cache.

Legend: N tokens, X blocks, W tokens of a block, S tokens under the attention,
M tokens whose logits are wanted, D embed, G kv heads, Q query heads for each
of them, E head_dim, V vocabulary.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.tree_attention import reference
from swiftspec_jax import errors, sharding
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.serving.target.flat_batch import FlatBatch

_KERNELS = 'tree_attention', 'swiglu', 'matmul_all_reduce'


def check_kernels(model: Model) -> None:
  """Notes in `dispatch.choices` that `forward` takes the references.

  Raises:
    UserError: the model insists on kernels.
  """

  def refuse():
    raise NotImplementedError('it does not serve a paged cache')

  platform = dispatch.platform_of(sharding.replicated(model.mesh))
  checks = dict.fromkeys(dispatch.IMPLEMENTATIONS, refuse)
  for kernel in _KERNELS:
    shape = f'{model.name} on a paged cache'
    try:
      dispatch.choose(kernel, shape, model.config.kernels, platform, checks)
    except NotImplementedError as error:
      raise errors.UserError(
        f'an engine cannot run {model.name} with '
        f'kernels={model.config.kernels!r}: {error}; load it with '
        "kernels='auto' or 'reference'"
      ) from error


def forward(
  params: Params,
  config: ModelConfig,
  token_ids: jax.Array,
  batch: FlatBatch,
  cache: paged.PagedCache,
  features_before: jax.Array | None = None,
) -> tuple[jax.Array, paged.PagedCache]:
  """Runs the model over tokens and writes what the cache keeps of them.

  Args:
    params: parameters, laid out as `params.param_specs(config)` says.
    config: static.
    token_ids: i32[N].
    batch: where the tokens belong.
    cache: cache of all rows.
    features_before: [N, D], where the model reads features; same as in
      `decoder.run_layers`.

  Returns:
    Hidden states [N, D] before the final norm, and the cache.
  """
  visible_by_kind = _visible_by_kind(config, batch, cache.page_size)
  keys, values = [], []

  def attend(i, queries, new_keys, new_values):
    keys.append(paged.write(cache.keys[i], new_keys[0], batch.places))
    values.append(paged.write(cache.values[i], new_values[0], batch.places))
    attended = reference.masked_attention(
      queries[0][batch.block_tokens],
      paged.read(keys[i], batch.block_pages, cache.dtype),
      paged.read(values[i], batch.block_pages, cache.dtype),
      visible_by_kind[config.is_sliding(i)],
      decoder.query_scale(config),
    )
    attended = attended.reshape(-1, *attended.shape[2:])
    return attended[batch.block_places][None]

  if features_before is not None:
    features_before = features_before[None]
  hidden, features = decoder.run_layers(
    params,
    config,
    token_ids[None],
    batch.positions[None],
    attend,
    features_before=features_before,
    feature_layers=cache.feature_layers,
  )
  if features is not None:
    features = paged.write(cache.features, features[0], batch.places)
  return hidden[0], cache.replace(keys=keys, values=values, features=features)


def _visible_by_kind(
  config: ModelConfig, batch: FlatBatch, page_size: int
) -> dict[bool, jax.Array]:
  """Returns bool[X, W, S] for layers without and with a sliding window."""
  context = batch.block_pages.shape[1] * page_size
  positions, mask = batch.positions[batch.block_tokens], batch.block_mask
  behind = positions[:, :, None] - jnp.arange(context)[None, None]

  def visible(mask):
    if mask is None:
      found = behind >= 0
    else:
      found = reference.visible_rows(positions[:, 0], mask, context)
    if config.eagle3:  # as in `decoder.forward_with_features`
      found &= jnp.arange(context)[None, None] > 0
    return found

  visible_by_kind = {False: visible(mask)}
  window = config.sliding_window
  if window is not None:
    if mask is not None:
      # The nodes of a tree do not lie at their positions.
      mask &= positions[:, :, None] - positions[:, None] < window
    visible_by_kind[True] = visible(mask) & (behind < window)
  return visible_by_kind


def logits_of(
  params: Params, config: ModelConfig, hidden: jax.Array
) -> jax.Array:
  """Returns logits f32[M, V] of hidden states [M, D]."""
  logits = decoder.unembed(params, config, hidden[None])
  return decoder.widen_logits(params, config, logits)[0]
