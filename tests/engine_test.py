"""The serving engine: the output of a request is its output alone.

Item 35 of the checklist, grammars, is in `structured_outputs_test`.
"""

import asyncio
import dataclasses
import functools

import numpy as np
import pytest
from decoding_cases import assert_same, request_of, requests_of, run
from decoding_test import letters, text_model
from engine_cases import (
  CHAINS,
  DRAFTS,
  FEW,
  MAX_CONTEXT,
  TARGET,
  RandomLengths,
  assert_empty,
  make_engine,
  random_requests,
  results_of,
)

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.engine import background
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.runtime import profiling
from swiftspec_jax.step import slot_sampling

pytestmark = pytest.mark.usefixtures('no_programs')

CIRCLE = text_model('abcdefgh', eos_token_ids=[7])
# `plugins_test` has trees that are often right, under every policy.
ALL_BUT_TREE = tuple(name for name in DRAFTS if name != 'tree')
TEXT_DRAFTS = 'lookup', 'suffixes', 'datastore'


def alone(requests, model=TARGET):
  """What plain decoding says."""
  return run(ss.Decoder(model, batch_size=4), requests)


@functools.cache
def plain_load(count, seed):
  """Random requests, and what plain decoding says."""
  requests = random_requests(count, seed)
  return requests, alone(requests)


def engine_of(draft, policy):
  """Few sizes for models that draft: each has programs of its own for them."""
  chains = CHAINS if draft in TEXT_DRAFTS else FEW
  return make_engine(DRAFTS[draft], policy, chains=chains)


def serve_at_random(engine, requests, seed=0):
  """Submits and cancels between steps; returns the handles."""
  generator = np.random.default_rng(seed)
  upcoming, handles, cancelled = iter(requests), [], set()
  while True:
    for _ in range(generator.poisson(0.5)):
      request = next(upcoming, None)
      if request is not None:
        limit = generator.choice([None, 0, 1, 2])
        handles.append(engine.submit(request, max_speculative_tokens=limit))
    if handles and generator.random() < 0.02:
      handle = handles[generator.integers(len(handles))]
      if not handle.is_finished:
        cancelled.add(handle.request_id)
      handle.cancel()
    if engine.step() is None and len(handles) == len(requests):
      return handles, cancelled


def check_load(draft, count, seed=0):
  requests, plain = plain_load(count, seed)
  engine = engine_of(draft, RandomLengths(seed))
  engine.programs.compile_all()
  with profiling.count_compilations() as compilations:
    handles, cancelled = serve_at_random(engine, requests, seed)
  assert compilations.count == 0
  assert engine.scheduler.num_preemptions > 0
  assert_empty(engine)
  for handle, expected in zip(handles, plain, strict=True):
    result = handle.result()
    updates = list(handle)
    tokens = sum((update.token_ids for update in updates), ())
    assert tokens == result.token_ids
    assert ''.join(update.text for update in updates) == result.text
    assert result.stats.new_tokens == len(result.token_ids)
    if handle.request_id in cancelled:
      assert result.finish_reason == 'cancelled'
      assert result.token_ids == expected.token_ids[: len(tokens)]
    else:
      assert result.token_ids == expected.token_ids
      assert result.text == expected.text
      assert result.finish_reason == expected.finish_reason
    if expected.logprobs is not None:
      np.testing.assert_allclose(
        result.logprobs, expected.logprobs[: len(tokens)], atol=1e-4
      )
      top = sum((update.top_logprobs or () for update in updates), ())
      assert top == result.top_logprobs
      np.testing.assert_allclose(
        top, expected.top_logprobs[: len(tokens)], atol=1e-4
      )
  assert cancelled
  check_evidence(engine, requests, is_lookup=draft in TEXT_DRAFTS)
  return engine


def check_evidence(engine, requests, is_lookup):
  """The policy hears which rows tell how good the drafter is."""
  for outcome in engine.policy.outcomes:
    for i, found in zip(
      outcome.view.request_ids.tolist(), outcome.is_usable, strict=True
    ):
      sampling = requests[i].sampling
      is_adjusted = sampling.banned_token_ids or sampling.forced_token_ids
      is_cut = sampling.top_k > 0 and not is_lookup
      assert found == (not is_adjusted and not is_cut)


@pytest.mark.parametrize('draft', ALL_BUT_TREE)
def test_output_under_load_is_that_of_plain_decoding(draft):
  """Items 26, 28, 30 to 33, 36, 37.

  Greedy, drawn, truncated and adjusted requests share steps; they arrive at any
  time, some are cancelled, and memory is short. Every length occurs, 0 too.
  """
  engine = check_load(draft, 32)
  assert sum(outcome.lengths.sum() for outcome in engine.policy.outcomes) > 50


def test_a_perfect_draft_stays_in_step():
  """Item 29: steps without drafts and preemption leave no gap in its cache."""
  engine = engine_of('itself', RandomLengths(2))
  requests = requests_of(16, ignore_eos=True)
  results = results_of(engine, requests)
  assert engine.scheduler.num_preemptions > 0
  assert_same(results, alone(requests))
  for outcome in engine.policy.outcomes:
    assert outcome.num_accepted.tolist() == outcome.lengths.tolist()
  assert sum(outcome.lengths.sum() for outcome in engine.policy.outcomes) > 50


@functools.cache
def conversations():
  """Requests of three turns, and what plain decoding says."""
  texts, turns = [(*range(20, 50), i) for i in range(3)], []
  for turn in range(3):
    requests = [
      request_of(
        text, max_new_tokens=18, temperature=i / 2, seed=turn, ignore_eos=True
      )
      for i, text in enumerate(texts)
    ]
    turns.append((requests, alone(requests)))
    texts = [
      (*text, *result.token_ids, turn)
      for text, result in zip(texts, turns[-1][1], strict=True)
    ]
  return turns


@pytest.mark.parametrize('draft', ['suffixes', 'itself', 'bad_tree'])
def test_conversations_that_share_pages_write_what_they_would_alone(draft):
  """A turn goes on from the text of the one before, beside others."""
  engine = engine_of(draft, RandomLengths(3))
  for requests, plain in conversations():
    assert_same(results_of(engine, requests), plain)
  # All that was fed before, in full pages, but for the first turn.
  assert engine.scheduler.num_shared_tokens == 3 * (48 + 64)
  assert_empty(engine)


def test_a_draw_is_drafted_with_the_noise_of_the_target():
  engine = engine_of('itself', FixedLength(3))
  request = requests_of(1, temperature=1.0, max_new_tokens=40)[0]
  stats = engine.submit(request).result().stats
  assert stats.num_accepted == stats.num_drafted > 25


def test_steps_without_drafts_leave_the_draft_alone():
  """Item 28."""
  engine = engine_of('bad_draft', FixedLength(0))
  engine.submit(requests_of(1)[0]).result()
  cache = engine.drafter.cache
  assert not any(np.asarray(keys).any() for keys in cache.keys)


def test_a_row_without_a_draft_decodes():
  """Rows that have no match, beside others that have one."""
  draft = ss.PromptLookup(prompt_lookup_min=1)
  engine = make_engine(draft, FixedLength(3), FEW, CIRCLE)
  prompts = 'a', 'abcdefghab'
  handles = [
    engine.submit(request_of(letters(p), max_new_tokens=100)) for p in prompts
  ]
  engine.step()
  record = engine.step()
  assert record.step.lengths.tolist() == [0, 3]
  assert record.num_accepted.tolist() == [0, 3]
  for handle in handles:
    handle.cancel()
  engine.step()
  assert_empty(engine)


@pytest.mark.parametrize('length', [24, 25, 130])
def test_a_prompt_in_chunks(length):
  """Item 33: chunks of at most 24 tokens give what one forward gives."""
  tokens = np.random.default_rng(0).integers(0, 256, length).tolist()
  request = request_of(tokens, max_new_tokens=5)
  handle = make_engine().submit(request)
  assert handle.result().token_ids == alone([request])[0].token_ids


def test_an_override_of_the_policy():
  """Item 37."""
  engine = engine_of('itself', FixedLength(3))
  request = requests_of(1, max_new_tokens=20)[0]
  for limit in (0, 2):
    stats = engine.submit(request, max_speculative_tokens=limit).result().stats
    assert stats.num_accepted == stats.num_drafted
    assert max([0, *np.flatnonzero(stats.drafted_per_position) + 1]) == limit


def test_bad_requests_are_refused():
  engine = make_engine()
  for request, message in (
    (ss.Request(token_ids=()), 'prompt is empty'),
    (ss.Request(token_ids=(0,) * MAX_CONTEXT), 'at most 160 tokens'),
    (ss.Request(token_ids=(9999,)), 'token 9999'),
  ):
    with pytest.raises(errors.UserError, match=message):
      engine.submit(request)
  assert_empty(engine)


def test_many_tokens_are_forced():
  """More than programs have room for before."""
  request = request_of((1,), forced_token_ids=(1, 2) * 9, max_new_tokens=19)
  result = make_engine().submit(request).result()
  assert result.token_ids[:18] == (1, 2) * 9


def test_a_thread_serves_asynchronous_users():
  requests = requests_of(6)
  engine = engine_of('itself', FixedLength(2))

  async def collect(request):
    handle = engine.submit(request)
    tokens = []
    async for update in handle:
      tokens += update.token_ids
    return tuple(tokens)

  async def leave(request):
    handle = engine.submit(request)
    async for update in handle:
      if update.token_ids:
        handle.cancel()
    return handle.result().finish_reason

  async def serve():
    endless = request_of((1, 2), max_new_tokens=150)
    return await asyncio.gather(leave(endless), *map(collect, requests))

  with background.running(engine):
    reason, *outputs = asyncio.run(serve())
    plain = engine.submit(requests[0]).result()
    left = engine.submit(requests[0])
  assert reason == 'cancelled'
  expected = [result.token_ids for result in alone(requests)]
  assert outputs == expected
  assert plain.token_ids == expected[0]
  assert left.is_finished
  assert_empty(engine)


@pytest.mark.parametrize(('is_tree', 'window'), [(False, 16), (True, 2)])
def test_sliding_windows(is_tree, window):
  layers = (True,) if is_tree else (True, False)
  config = dataclasses.replace(
    TARGET.config,
    num_layers=len(layers),
    sliding_window=window,
    sliding_layers=layers,
  )
  model = testing.random_model(config, seed=3)
  requests = requests_of(6)
  draft = DRAFTS['lookup']
  if is_tree:
    draft = TreeDraft(model=model, width=3, branching=2)
  engine = make_engine(draft, FixedLength(3), FEW, model)
  assert_same(results_of(engine, requests), alone(requests, model))


def test_requests_that_tell_how_good_a_drafter_is():
  """A draft model does not know that a distribution was cut; a lookup knows no
  distribution."""
  slots = slot_sampling.SlotSampling(6, vocab_size=8, put=lambda x: x)
  for slot, options in enumerate(
    (
      {'logprobs': True},
      {'temperature': 1.0},
      {'temperature': 1.0, 'top_k': 2},
      {'temperature': 1.0, 'top_p': 0.9},
      {'temperature': 1.0, 'min_p': 0.1},
      {'banned_token_ids': (1,)},
    )
  ):
    slots.set(slot, ss.SamplingParams(**options))
  everyone = np.arange(6)
  by_model = slots.is_usable(everyone, for_model=True)
  assert by_model.tolist() == [True, True, False, False, False, False]
  by_lookup = slots.is_usable(everyone, for_model=False)
  assert by_lookup.tolist() == [True, True, True, True, True, False]
  # A request that comes to the slot is another one.
  slots.set(5, ss.SamplingParams())
  assert slots.is_usable(everyone, for_model=True)[5]
