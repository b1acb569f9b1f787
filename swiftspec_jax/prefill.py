"""A model reads a prompt, chunk by chunk.

Target and draft read it with the same program, whatever drafts afterwards.

Legend: B rows, C tokens of a chunk, H features of the target.
"""

import functools

import jax
import jax.numpy as jnp

from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params


@functools.partial(
  jax.jit,
  static_argnames=('config', 'context', 'feature_layers'),
  donate_argnames='cache',
)
def prefill_chunk(
  params: Params,
  cache: dense.KVCache,
  token_ids: jax.Array,
  starts: jax.Array,
  num_kept: jax.Array,
  *,
  config: ModelConfig,
  context: int,
  feature_layers: tuple[int, ...] = (),
) -> tuple[dense.KVCache, jax.Array | None]:
  """Takes a chunk of known tokens into a cache.

  Args:
    params: parameters of the model.
    cache: donated.
    token_ids: i32[B, C].
    starts: i32[B] first position of the chunk. It may lie below `kv_lengths`:
      those rows are computed again, to the same values.
    num_kept: i32[B] committed tokens afterwards.
    config: configuration of the model; static.
    context: static bound: starts + C is at most this.
    feature_layers: static indices of layers whose outputs are returned.

  Returns:
    The cache, and the features bf16[B, C, H] of the chunk, or None.
  """
  _, features, cache = decoder.forward_with_features(
    params,
    config,
    token_ids,
    cache,
    starts=starts,
    context=context,
    feature_layers=feature_layers,
  )
  if features is not None:
    features = features.astype(jnp.bfloat16)
  return cache.replace(kv_lengths=num_kept), features
