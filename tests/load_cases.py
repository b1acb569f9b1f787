"""Requests that come and go at any time, and oracles for what comes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tree_cases import CONFIG

from swiftspec_jax import testing
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step.slot_sampling import level_of

MAX_CONTEXT = 200
_NUM_ROWS = 64  # more than an output has tokens
ALONE = testing.random_model(CONFIG)  # the target on one device


def serve(engine, requests, seed, share_of_cancelled=0.1):
  """Submits and cancels at random between steps; returns the results."""
  generator = np.random.default_rng(seed)
  waiting, handles = list(requests), []
  while waiting or engine.num_requests:
    for _ in range(generator.integers(0, 3)):
      if waiting:
        handles.append(engine.submit(waiting.pop(0)))
    if handles and generator.random() < share_of_cancelled:
      handles[generator.integers(len(handles))].cancel()
    engine.step()
  return [handle.result() for handle in handles]


def check(requests, results, model=ALONE):
  """Each output is what plain decoding without a cache chooses."""
  for request, result in zip(requests, results, strict=True):
    output = np.array(result.token_ids, int)
    limit = request.sampling.max_new_tokens
    assert result.finish_reason in ('length', 'cancelled')
    assert result.finish_reason == 'cancelled' or len(output) == limit
    if len(output):
      np.testing.assert_array_equal(output, choices(model, request, output))


def choices(model, request, output):
  """What is chosen after a prompt and each part of an output, read at once."""
  num_prompt, text = len(request.token_ids), [*request.token_ids, *output]
  # Each prefix is a row of its own, so that penalties count what it has.
  lengths = num_prompt + np.arange(_NUM_ROWS)
  chosen = _choose(
    model.params,
    model.config,
    np.array([text + [0] * (MAX_CONTEXT - len(text))], np.int32),
    dense.init(model.config, 1, MAX_CONTEXT, model.dtype, model.mesh),
    np.minimum(lengths, len(text) - 1).astype(np.int32),
    np.full(_NUM_ROWS, num_prompt, np.int32),
    sampling_lib.make_state(
      [request.sampling] * _NUM_ROWS,
      model.config.vocab_size,
      level_of(request.sampling),
      eos_token_ids=model.config.eos_token_ids,
    ),
  )
  return np.asarray(chosen)[: len(output)]


@functools.partial(jax.jit, static_argnums=1)
def _choose(params, config, token_ids, cache, lengths, prompt_lengths, state):
  starts = jnp.zeros(1, jnp.int32)
  hidden, _ = decoder.forward(params, config, token_ids, cache, starts=starts)
  logits = sampling_lib.adjust_logits(
    decoder.unembed(params, config, hidden[0, lengths - 1][:, None]),
    state,
    token_ids=jnp.repeat(token_ids, len(lengths), axis=0),
    lengths=lengths,
    prompt_lengths=prompt_lengths,
  )
  if state.temperatures is not None:
    keys = sampling_lib.position_keys(
      state.seeds, lengths[:, None], sampling_lib.Stream.OUTPUT
    )
    logits = sampling_lib.distribution_logits(logits, state)
    logits += sampling_lib.gumbel_noise(keys, logits.shape[2])
  return logits[:, 0].argmax(axis=-1)


_SIZE = 224  # of a padded text


@functools.partial(jax.jit, static_argnames=('config', 'feature_layers'))
def _forward(params, config, token_ids, cache, before, feature_layers):
  return decoder.forward_with_features(
    params,
    config,
    token_ids,
    cache,
    starts=jnp.zeros(1, jnp.int32),
    features_before=before,
    feature_layers=feature_layers,
  )


def read(model, text, before=None, feature_layers=()):
  """Hidden states, features and cache rows of a text, from scratch."""
  padded = np.zeros((1, _SIZE), np.int32)
  padded[0, : len(text)] = text
  if before is not None:
    size = before.shape[1]
    before = np.pad(before, ((0, 0), (0, _SIZE - size), (0, 0)))
  cache = dense.init(model.config, 1, _SIZE, jnp.float32, model.mesh)
  hidden, features, cache = _forward(
    model.params, model.config, padded, cache, before, feature_layers
  )
  size = len(text)
  if features is not None:
    features = np.asarray(features)[:, :size]
  return np.asarray(hidden)[:, :size], features, rows_of(cache)[..., :size, :]


def rows_of(cache):
  """Keys and values [2, layers, G, S, E] of the first row."""
  return np.stack([np.stack(cache.keys), np.stack(cache.values)])[:, :, 0]
