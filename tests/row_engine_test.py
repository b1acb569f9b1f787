"""Trees under continuous batching: requests that come and go at any time."""

import dataclasses

import jax
import numpy as np
import pytest
import server_cases
from engine_cases import random_sampling
from tree_cases import CONFIG, TREE

import swiftspec_jax as ss
from swiftspec_jax import errors, profiling, scoring, testing
from swiftspec_jax.cache import dense
from swiftspec_jax.engine.rows import RowEngine
from swiftspec_jax.models import decoder
from swiftspec_jax.server.service import Service

MAX_CONTEXT = 200
ALONE = testing.random_model(CONFIG)  # the target on one device
# Devices of target and draft; serial drafts share those of the target. A draft
# has the first ones, so that modes share its programs, which take the longest.
SPLITS = {'serial': (2, 0), 'async': (1, 1), 'eight': (6, 2)}


def make_engine(split, waits_for_misses=None, with_models=False, **options):
  """An engine whose draft is right most of the time."""
  num_target, num_draft = SPLITS[split]
  devices = jax.devices()[: num_target + num_draft]
  target = testing.random_model(CONFIG, devices=devices[num_draft:])
  draft = testing.random_model(
    dataclasses.replace(CONFIG, num_layers=1),
    devices=devices[:num_draft] or devices,
  )
  engine = RowEngine(
    target,
    draft,
    tree=dataclasses.replace(
      TREE, prompt_lookup=True, waits_for_misses=waits_for_misses
    ),
    max_rows=3,
    max_context=MAX_CONTEXT,
    **options,
  )
  engine.prepare(MAX_CONTEXT)
  return (engine, target, draft) if with_models else engine


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


@pytest.mark.parametrize(
  ('split', 'run_ahead', 'waits_for_misses'),
  [
    ('serial', 0, None),
    ('serial', 2, None),
    ('async', 0, False),
    ('async', 1, True),
    ('async', 2, None),
  ],
)
def test_outputs_are_those_of_plain_decoding(
  split, run_ahead, waits_for_misses
):
  engine = make_engine(split, waits_for_misses, run_ahead=run_ahead)
  requests = random_requests(16, seed=run_ahead)
  sampling = [request.sampling for request in requests]
  # Once, a program is compiled when the fourth one forces tokens.
  is_early = (split, run_ahead) != ('serial', 0)
  engine.prepare(MAX_CONTEXT, sampling if is_early else sampling[:3])
  results = serve(engine, requests, seed=run_ahead)
  check(requests, results)
  reasons = [result.finish_reason for result in results]
  assert {'length', 'cancelled'} == set(reasons)
  accepted = sum(result.stats.num_accepted for result in results)
  assert accepted > 0
  assert engine.num_requests == engine.num_running == 0


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


@pytest.mark.parametrize('waits_for_misses', [True, False, None])
def test_caches_are_those_of_a_fresh_prefill(waits_for_misses):
  """Whatever was rejected, missed, stopped or put into a row before."""
  engine, target, draft = make_engine(
    'async', waits_for_misses, with_models=True
  )
  requests = [
    dataclasses.replace(
      request, sampling=ss.SamplingParams(max_new_tokens=16 * (i + 1))
    )
    for i, request in enumerate(random_requests(6, seed=3))
  ]
  handles = [engine.submit(request) for request in requests]
  while not handles[2].is_finished:
    engine.step()
  handles[4].cancel()
  for _ in range(3):
    engine.step()
  engine.drain()
  texts, draft_cache = jax.device_get(
    (
      engine.pipeline._target_rows.state,
      engine.pipeline._draft_rows.state.cache,
    )
  )
  slots = [i for i, job in enumerate(engine._rows) if job is not None]
  assert slots
  for slot in slots:
    token_ids = texts.token_ids[slot, : texts.lengths[slot]].tolist()
    for model, cache in ((target, texts.target_cache), (draft, draft_cache)):
      known = int(cache.kv_lengths[slot])
      assert len(token_ids) - known in ((1,) if model is target else (1, 2))
      want = jax.device_get(fresh_cache(model, token_ids))
      for got, fresh in zip(
        [*cache.keys, *cache.values], [*want.keys, *want.values], strict=True
      ):
        np.testing.assert_allclose(
          got[slot, :, :known], fresh[0, :, :known], atol=1e-5
        )
  engine.cancel_all()


def test_outputs_on_more_devices():
  engine = make_engine('eight')
  requests = random_requests(12, seed=7)
  engine.prepare(MAX_CONTEXT, [request.sampling for request in requests])
  check(requests, serve(engine, requests, seed=7))


def test_nothing_is_compiled_after_warm_up():
  engine = make_engine('async')
  engine.warm_up()
  requests = [
    dataclasses.replace(r, sampling=ss.SamplingParams(max_new_tokens=10))
    for r in random_requests(8, seed=1)
  ]
  with profiling.count_compilations() as compilations:
    serve(engine, requests, seed=1)
  assert compilations.count == 0


def test_limits_of_drafts_are_refused():
  engine = make_engine('serial')
  request = ss.Request(token_ids=(1, 2))
  engine.submit(request, max_speculative_tokens=7)
  with pytest.raises(errors.UserError, match='max_speculative_tokens=2'):
    engine.submit(request, max_speculative_tokens=2)
  with pytest.raises(errors.UserError, match='at most 200'):
    engine.submit(ss.Request(token_ids=(1,) * 200))
  engine.cancel_all()
  assert engine.step() is None
  with pytest.raises(errors.UserError, match='max_context=300 is more than'):
    RowEngine(ALONE, max_context=300)


def test_an_engine_that_was_not_warmed_up_serves():
  engine = RowEngine(ALONE, max_context=MAX_CONTEXT)
  request = random_requests(1, seed=5)[0]
  result = engine.submit(request).result()
  check([request], [result])


def test_a_server_drafts_on_devices_of_its_own():
  engine, target, _ = make_engine('async', with_models=True)
  service = Service(engine, target, name=server_cases.NAME)
  engine.warm_up()
  options = {'max_tokens': 60, 'temperature': 1, 'seed': 3, 'n': 5}
  options['stream_options'] = {'include_speculation': True}
  with (
    server_cases.serving(service) as address,
    server_cases.client_of(address) as client,
  ):
    stream = client.completions.create(
      model=server_cases.NAME, prompt='aegc', stream=True, **options
    )
    events = list(stream)
    _, figures = server_cases.fetch(f'{address}/metrics')
  results = ss.generate(
    ALONE,
    ['aegc'] * 5,
    sampling=[
      ss.SamplingParams(max_new_tokens=60, temperature=1, seed=3 + i)
      for i in range(5)
    ],
    use_chat_template=False,
  )
  texts, ends, _, _ = server_cases.collect(events)
  for i, result in enumerate(results):
    assert (texts[i], ends[i]) == (result.text, result.finish_reason)
  steps = [c.speculation for event in events for c in event.choices]
  sources = [piece['source'] for step in steps for piece in step['pieces']]
  assert len(sources) == sum(r.stats.new_tokens for r in results)
  assert set(sources) == {'draft', 'target'}
  values = dict(
    line.rsplit(maxsplit=1)
    for line in figures.splitlines()
    if not line.startswith('#')
  )

  def value(name, **labels):
    labels = {'model_name': server_cases.NAME, **labels}
    names = ','.join(f'{k}="{v}"' for k, v in labels.items())
    return float(values[f'{name}{{{names}}}'])

  assert value('vllm:spec_decode_num_accepted_tokens_total') > 0
  verdicts = 'swiftspec:spec_decode_num_tree_verdicts_total'
  assert value(verdicts, outcome='hit') > 0
  seconds = value('swiftspec:step_seconds_total')
  assert 0 < value('swiftspec:step_host_seconds_total') < seconds
