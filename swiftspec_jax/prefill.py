"""A model reads a prompt, chunk by chunk.

Target and draft read it with the same program, whatever drafts afterwards.

Legend: B rows, C tokens of a chunk.
"""

import functools

import jax

from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params


@functools.partial(
  jax.jit, static_argnames=('config', 'context'), donate_argnames='cache'
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
) -> dense.KVCache:
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
  """
  _, features, cache = decoder.forward_with_features(
    params,
    config,
    token_ids,
    cache,
    starts=starts,
    context=context,
    feature_layers=cache.feature_layers,
  )
  cache = dense.write_features(cache, features, starts)
  return cache.replace(kv_lengths=num_kept)
