"""Greedy output of the embedded model in all modes, on all shipped prompts.

`pytest -m slow tests/tree_exactness_test.py --log-cli-level=INFO` names each
difference. The splits need the eight simulated devices of the test run; the
others are faster with `JAX_NUM_CPU_DEVICES=2`, as each device has threads of
its own.
"""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftspec_jax as ss
from experiments.flags import run_flags
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.models import decoder

pytestmark = pytest.mark.slow

_NAME = 'smollm2-135m-instruct'
_NUM_PROMPTS = 60
# What 8-token and 1-token products may round differently.
_NEAR_TIE = 1e-4
_TREE = TreeConfig(num_restart_steps=1, forced_acceptance=0.7)


@functools.cache
def load(first, last, num_layers=None):
  devices = jax.devices()[first:last]
  return ss.load(
    _NAME, devices=devices, num_layers=num_layers, weight_dtype='wide'
  )


def run(target_decoder, requests):
  found = {e.index: e.result for e in target_decoder.run(requests) if e.result}
  return [found[i] for i in range(len(requests))]


@functools.cache
def requests_of(num_prompts, max_new_tokens):
  """Requests with the plain output, which the draft mostly guesses."""
  target = load(0, 1)
  sampling = ss.SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
  requests = [
    ss.Request(
      token_ids=tuple(
        tokenizer_lib.encode_prompt(target.tokenizer, prompt.turns[0])
      ),
      sampling=sampling,
    )
    for prompt in prompts_lib.read_prompts(
      run_flags.DEFAULT_PROMPTS, num_prompts
    )
  ]
  results = run(ss.Decoder(target, batch_size=4), requests)
  return [
    dataclasses.replace(request, reference_token_ids=result.token_ids)
    for request, result in zip(requests, results, strict=True)
  ]


def gap(token_ids):
  """The target's lead of the best over the second logit after a text."""
  target = load(0, 1)
  cache = dense.init(target.config, 1, len(token_ids), 'float32', target.mesh)
  hidden, _ = decoder.forward(
    target.params,
    target.config,
    jnp.asarray([token_ids]),
    cache,
    starts=jnp.zeros(1, jnp.int32),
  )
  logits = decoder.unembed(target.params, target.config, hidden[:, -1:])
  best, second = jax.lax.top_k(logits[0, 0], 2)[0]
  return float(best - second)


def check(results, requests):
  num_different = 0
  for i, (result, request) in enumerate(zip(results, requests, strict=True)):
    want = request.reference_token_ids
    if result.token_ids == want:
      continue
    place = int(np.argmax(np.not_equal(result.token_ids, want)))
    lead = gap(request.token_ids + want[:place])
    logging.info('prompt %d: token %d, lead of %.1e', i, place, lead)
    assert lead < _NEAR_TIE
    num_different += 1
  logging.info('%d of %d outputs differ', num_different, len(results))


SETTINGS = {
  # name: target devices, draft devices, nodes, run-ahead, rows
  'serial': ((0, 1), (0, 1), 8, 1, 4),
  'async': ((0, 1), (1, 2), 8, 1, 4),
  'async_4_nodes': ((0, 1), (1, 2), 4, 1, 4),
  'async_16_nodes': ((0, 1), (1, 2), 16, 1, 4),
  'async_lock_step': ((0, 1), (1, 2), 8, 0, 4),
  'async_two_ahead': ((0, 1), (1, 2), 8, 2, 4),
  'async_2+1': ((0, 2), (2, 3), 8, 1, 4),
  'async_6+2': ((0, 6), (6, 8), 8, 1, 4),
}


@pytest.mark.parametrize('name', SETTINGS)
def test_greedy_output_is_that_of_plain_decoding(name):
  target_devices, draft_devices, num_nodes, run_ahead, batch_size = SETTINGS[
    name
  ]
  requests = requests_of(_NUM_PROMPTS, 128)
  tree_decoder = ss.Decoder(
    load(*target_devices),
    load(*draft_devices, num_layers=2),
    tree=dataclasses.replace(_TREE, num_nodes=num_nodes),
    batch_size=batch_size,
    run_ahead=run_ahead,
  )
  check(run(tree_decoder, requests), requests)


def test_a_long_output():
  requests = requests_of(1, 2000)
  tree_decoder = ss.Decoder(load(0, 1), load(1, 2, num_layers=2), tree=_TREE)
  check(run(tree_decoder, requests), requests)
