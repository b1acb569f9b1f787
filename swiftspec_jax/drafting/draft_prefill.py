"""A draft that reads features reads the prompt, chunk by chunk.

Legend: B rows, C tokens of a chunk, S tokens, D embed, H features of the
target.
"""

import functools

import jax

from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafting import feature_draft
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params


@functools.partial(
  jax.jit,
  static_argnames=('config', 'context'),
  donate_argnames=('cache', 'features_before'),
)
def prefill_chunk(
  params: Params,
  cache: dense.KVCache,
  features_before: jax.Array,
  token_ids: jax.Array,
  features: jax.Array,
  starts: jax.Array,
  num_kept: jax.Array,
  *,
  config: ModelConfig,
  context: int,
) -> tuple[dense.KVCache, jax.Array, jax.Array]:
  """Does what `prefill.prefill_chunk` does, for such a draft.

  Args:
    params: parameters of the draft.
    cache: donated.
    features_before: [B, S, D] of the token before each one, as far as they are
      known; that of the first token is 0. Donated.
    token_ids: i32[B, C].
    features: [B, C, H] of these tokens, of the target.
    starts: same as in `prefill_chunk`.
    num_kept: same as in `prefill_chunk`.
    config: static configuration of the model.
    context: static bound: starts + C is at most this.

  Returns:
    The cache, `features_before`, and the one of the token that comes next,
    [B, D].
  """
  features_before = feature_draft.put_behind(
    features_before, decoder.project_features(params, config, features), starts
  )
  _, cache = decoder.forward(
    params,
    config,
    token_ids,
    cache,
    starts=starts,
    context=context,
    features_before=feature_draft.take_chunk(
      features_before, starts, token_ids.shape[1]
    ),
  )
  before_next = feature_draft.take_chunk(features_before, num_kept, 1)[:, 0]
  return cache.replace(kv_lengths=num_kept), features_before, before_next
