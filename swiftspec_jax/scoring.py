"""How a model rates a text that is given."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import buckets
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params


def score(
  model: Model, token_ids: Sequence[int], first: int
) -> tuple[np.ndarray, np.ndarray]:
  """Reads a text in one forward pass.

  Args:
    model: any target.
    token_ids: n tokens; 1 <= first < n.
    first: the first token that is rated.

  Returns:
    The log-probability f32[n - first] of each token from `first` on, given
    those before it, and the token i32[n - first] that is the most probable one
    in its place.
  """
  size = buckets.power_of_two(len(token_ids))
  padded = np.zeros((1, size), np.int32)
  padded[0, : len(token_ids)] = token_ids
  cache = dense.KVCacheConfig.of_model(model.config, 1, size, model.dtype)
  log_probs, best = _score(
    model.params,
    jnp.asarray(padded),
    cache.init(model.mesh),
    config=model.config,
  )
  rated = slice(first - 1, len(token_ids) - 1)
  return np.asarray(log_probs)[rated], np.asarray(best)[rated]


@functools.partial(jax.jit, static_argnames='config')
def _score(
  params: Params,
  token_ids: jax.Array,
  cache: dense.KVCache,
  *,
  config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Rates the token behind each of i32[1, S]: f32[S] and i32[S]."""
  size = token_ids.shape[1]
  hidden, _ = decoder.forward(
    params,
    config,
    token_ids,
    cache,
    starts=jnp.zeros(1, jnp.int32),
    context=size,
  )

  def rate(block):
    hidden, following = block
    logits = decoder.unembed(params, config, hidden[None])[0]
    chosen = jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=1)
    return log_probs, logits.argmax(axis=1)

  # The logits of all tokens at once would be larger than the model.
  blocks = (
    hidden.reshape(-1, buckets.SMALLEST, config.embed_dim),
    jnp.roll(token_ids[0], -1).reshape(-1, buckets.SMALLEST),
  )
  log_probs, best = jax.lax.map(rate, blocks)
  return log_probs.ravel(), best.ravel()
