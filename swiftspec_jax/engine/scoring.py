"""How a model rates a text that is given."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import buckets
from swiftspec_jax.tree import types

_FEWEST_TOKENS = 256  # of what is compiled: many requests are short


def score(
  model: Model, token_ids: Sequence[int], first: int, num_top: int = 1
) -> types.Logprobs:
  """Reads a text, however long, in chunks.

  Several processes that share the model must call it together.

  Args:
    model: any target; a text may be longer than its context.
    token_ids: n tokens; 1 <= first <= n.
    first: the first token that is rated.
    num_top: number k of the most probable tokens in each place.

  Returns:
    The log-probability f32[n - first] of each token from `first` on, given
    those before it, and the k most probable tokens in its place: arrays of the
    host without the leading axis.
  """
  capacity = buckets.power_of_two(len(token_ids), _FEWEST_TOKENS)
  padded = np.zeros((1, capacity), np.int32)
  padded[0, : len(token_ids)] = token_ids
  cache = dense.init(model.config, 1, capacity, model.dtype, model.mesh)
  following = np.roll(padded, -1)
  size = min(cache.capacity, buckets.SMALLEST)
  found = []
  for start in range(0, len(token_ids), size):
    end = start + size
    inputs = (
      padded[:, start:end],
      following[:, start:end],
      np.array([start], np.int32),
    )
    cache, rated = _score(
      model.params,
      cache,
      *sharding.argument(inputs, model.mesh),
      config=model.config,
      context=buckets.context_of(end, cache.capacity),
      num_top=num_top,
    )
    found.append(jax.device_get(sharding.everywhere(rated)))
  rated = slice(first - 1, len(token_ids) - 1)
  return jax.tree.map(lambda *parts: np.concatenate(parts)[rated], *found)


@functools.partial(
  jax.jit,
  static_argnames=('config', 'context', 'num_top'),
  donate_argnames='cache',
)
def _score(
  params: Params,
  cache: dense.KVCache,
  token_ids: jax.Array,
  following: jax.Array,
  starts: jax.Array,
  *,
  config: ModelConfig,
  context: int,
  num_top: int,
) -> tuple[dense.KVCache, types.Logprobs]:
  """Rates the tokens i32[1, C] after those of a chunk i32[1, C]."""
  hidden, cache = decoder.forward(
    params, config, token_ids, cache, starts=starts, context=context
  )
  logits = decoder.unembed(params, config, hidden)
  rated = types.Logprobs.at(logits, following, num_top)
  return cache, jax.tree.map(lambda x: x[0], rated)
