"""How a model rates a text that is given."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import sharding, types
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.requests import Request
from swiftspec_jax.step import buckets
from swiftspec_jax.step import sampling as sampling_lib

# Of what is compiled: many requests are short.
_FEWEST_TOKENS, _FEWEST_ROWS = 256, 64


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
  padded, cache = _new_text(model, token_ids)
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


def choices(
  model: Model, request: Request, output: Sequence[int]
) -> np.ndarray:
  """Reads prompt and output in one forward pass, without a cache from before.

  An output is that of plain decoding if and only if it equals these choices:
  the oracle that engines are tested against.

  Args:
    model: any target.
    request: prompt, and distribution to draw from.
    output: n tokens, 1 <= n.

  Returns:
    i32[n], the token that is chosen after the prompt and the tokens of the
    output before it.
  """
  num_prompt = len(request.token_ids)
  token_ids = [*request.token_ids, *output]
  num_rows = buckets.power_of_two(len(output), _FEWEST_ROWS)
  # Each prefix is a row of its own, so that penalties count what it has.
  lengths = num_prompt + np.arange(num_rows, dtype=np.int32)
  sampling = sampling_lib.make_state(
    [request.sampling] * num_rows,
    model.config.vocab_size,
    eos_token_ids=model.config.eos_token_ids,
  )
  chosen = _choose(
    model.params,
    *_new_text(model, token_ids),
    np.minimum(lengths, len(token_ids) - 1),
    np.full(num_rows, num_prompt, np.int32),
    sampling,
    config=model.config,
  )
  return np.asarray(chosen)[: len(output)]


def _new_text(
  model: Model, token_ids: Sequence[int]
) -> tuple[np.ndarray, dense.KVCache]:
  """Returns tokens i32[1, S], padded, and an empty cache for them."""
  size = buckets.power_of_two(len(token_ids), _FEWEST_TOKENS)
  padded = np.zeros((1, size), np.int32)
  padded[0, : len(token_ids)] = token_ids
  cache = dense.KVCacheConfig.of_model(model.config, 1, size, model.dtype)
  return padded, cache.init(model.mesh)


@functools.partial(jax.jit, static_argnames='config')
def _choose(
  params: Params,
  token_ids: jax.Array,
  cache: dense.KVCache,
  lengths: jax.Array,
  prompt_lengths: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
) -> jax.Array:
  """Returns the tokens i32[R] that follow the first i32[R] tokens."""
  hidden = _hidden(params, token_ids, cache, config)[lengths - 1]
  logits = sampling_lib.adjust_logits(
    decoder.unembed(params, config, hidden[:, None]),
    sampling,
    token_ids=jnp.broadcast_to(token_ids, (len(lengths), token_ids.shape[1])),
    lengths=lengths,
    prompt_lengths=prompt_lengths,
    draft_token_ids=jnp.zeros((len(lengths), 0), jnp.int32),
  )
  return sampling_lib.choose(logits, lengths[:, None], sampling)[:, 0]


def _hidden(params, token_ids, cache, config):
  """Returns the hidden states [S, E] of tokens i32[1, S]."""
  hidden, _ = decoder.forward(
    params,
    config,
    token_ids,
    cache,
    starts=jnp.zeros(1, jnp.int32),
    context=token_ids.shape[1],
  )
  return hidden[0]


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
