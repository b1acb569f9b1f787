"""Requests that come and go at any time, and oracles for what comes of them."""

import jax
import numpy as np
from engine_cases import random_sampling
from tree_cases import CONFIG

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.cache import dense
from swiftspec_jax.engine import scoring
from swiftspec_jax.models import decoder

MAX_CONTEXT = 200
ALONE = testing.random_model(CONFIG)  # the target on one device


def random_requests(count, seed):
  generator = np.random.default_rng(seed)
  return [
    ss.Request(
      token_ids=tuple(
        generator.integers(0, 256, generator.integers(1, 90)).tolist()
      ),
      sampling=random_sampling(generator),
    )
    for _ in range(count)
  ]


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
      want = scoring.choices(model, request, output)
      np.testing.assert_array_equal(output, want)


forward = jax.jit(decoder.forward, static_argnums=1, static_argnames='context')


def fresh_cache(model, token_ids):
  """The cache of a text that is read at once."""
  padded = np.zeros((1, MAX_CONTEXT), np.int32)
  padded[0, : len(token_ids)] = token_ids
  config = dense.KVCacheConfig.of_model(
    model.config, 1, MAX_CONTEXT, model.dtype
  )
  _, cache = forward(
    model.params,
    model.config,
    padded,
    config.init(model.mesh),
    starts=np.zeros(1, np.int32),
    context=MAX_CONTEXT,
  )
  return cache
