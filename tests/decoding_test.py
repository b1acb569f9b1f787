"""The host loop: exactness, rows that come and go, stops, statistics."""

import functools
import pathlib
import subprocess
import sys

import jax
import numpy as np
import programs
import pytest
from decoding_cases import CONFIG, assert_same, request_of, requests_of, run

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.runtime import profiling
from swiftspec_jax.step import program_sizes

pytestmark = pytest.mark.usefixtures('no_programs')

TARGET = testing.random_model(CONFIG, seed=0, name='target')
# Right hardly ever.
BAD_DRAFT = testing.random_model(CONFIG, seed=1, name='bad-draft')

DRAFTS = {
  'none': None,
  'prompt_lookup': ss.PromptLookup(num_speculative_tokens=3),
  'bad_draft': BAD_DRAFT,
}


def plain_tokens(request):
  """Oracle: a Python loop that prefills everything for each token."""
  token_ids = list(request.token_ids)
  for _ in range(request.sampling.max_new_tokens):
    alone = request_of(token_ids, max_new_tokens=1)
    token_ids += run(ORACLE, [alone])[0].token_ids
  return tuple(token_ids[len(request.token_ids) :])


ORACLE = ss.Decoder(TARGET, run_ahead=0)


@functools.cache
def plain_of(num_requests):
  return run(ORACLE, requests_of(num_requests))


def test_plain_decoding_equals_prefill_for_each_token():
  for request in requests_of(3, max_new_tokens=16):
    (result,) = run(ss.Decoder(TARGET), [request])
    assert result.token_ids == plain_tokens(request)


@pytest.mark.parametrize(
  ('draft', 'run_ahead'),
  [('none', 2), ('prompt_lookup', 0), ('prompt_lookup', 2), ('bad_draft', 0)],
)
def test_greedy_output_is_that_of_plain_decoding(draft, run_ahead):
  """One row; `test_a_row_depends_on_its_own_request_only` has batches."""
  decoder = ss.Decoder(TARGET, DRAFTS[draft], run_ahead=run_ahead)
  assert_same(run(decoder, requests_of(7)), plain_of(7))
  assert {result.finish_reason for result in plain_of(7)} == {'length'}


@pytest.mark.parametrize(
  ('draft', 'tree'),
  [
    (None, None),
    (DRAFTS['prompt_lookup'], None),
    (BAD_DRAFT, ss.TreeConfig(num_nodes=5, width=2)),
  ],
  ids=['plain', 'lookup', 'tree'],
)
def test_all_steps_have_one_width_on_gpus(monkeypatch, draft, tree):
  monkeypatch.setattr(program_sizes, 'least_tokens', lambda mesh, rows: 16)
  decoder = ss.Decoder(TARGET, draft, tree=tree)
  requests = requests_of(3)
  with decoder.engine_for(requests) as engine:
    engine._target.narrows = False
    widths = {flat.num_tokens for flat in engine.sizes.all_mixed()}
    assert min(widths) == engine.sizes.plain(1, 512).num_tokens == 16
  assert_same(run(decoder, requests), plain_of(3))


def test_perfect_draft_accepts_everything():
  request = requests_of(1, max_new_tokens=40)[0]
  stats = run(ss.Decoder(TARGET, TARGET), [request])[0].stats
  assert stats.acceptance_rate_per_position == (1, 1, 1, 1)
  # The prompt gives the first token, and its end leaves room for 4 more.
  assert (stats.num_rounds, stats.decoded_tokens) == (8, 39)


def markov_table(size, seed, sharpness=1.0):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(size, size)) * sharpness
  probs = np.exp(logits)
  return probs / probs.sum(1, keepdims=True)


DRAWS = [
  request_of((1, 0, 2, 1, 0), temperature=1.0, seed=seed, max_new_tokens=3)
  for seed in range(1000)
]


def assert_follows_distribution(results, table, early=None, most=69):
  """Chi-square over all sequences that a table of 3 tokens draws as DRAWS.

  Of 26 degrees of freedom chance exceeds 69 once in 10^5. `early` is the table
  of the first two tokens, if it is another one.
  """
  counts = np.zeros((3, 3, 3))
  for result in results:
    counts[result.token_ids] += 1
  early = table if early is None else early
  expected = early[0][:, None, None] * early[:, :, None] * table * len(results)
  is_possible = expected > 0
  assert counts[~is_possible].sum() == 0
  counts, expected = counts[is_possible], expected[is_possible]
  assert ((counts - expected) ** 2 / expected).sum() < most


@pytest.mark.parametrize('draft', ['none', 'model'])
def test_sampled_sequences_follow_the_target_distribution(draft):
  """Chi-square over all sequences of three tokens, through the whole loop."""
  table = markov_table(3, seed=0)
  drafts = {'none': None, 'model': testing.table_model(markov_table(3, seed=5))}
  decoder = ss.Decoder(testing.table_model(table), drafts[draft], batch_size=64)
  assert_follows_distribution(run(decoder, DRAWS), table)


def text_model(text, **options):
  """A table model that says `text` (all letters different) in a circle."""
  table, ids = np.eye(26), [*letters(text)]
  table[ids] = table[ids[1:] + ids[:1]]
  return testing.table_model(table, **options)


def letters(text):
  return tuple(ord(c) - ord('a') for c in text)


@pytest.mark.parametrize(
  ('draft', 'run_ahead'),
  [
    (None, 1),
    (ss.PromptLookup(prompt_lookup_min=1), 0),
    (ss.PromptLookup(prompt_lookup_min=1), 3),
    ('itself', 1),
  ],
)
def test_stops_cut_the_output_exactly(draft, run_ahead):
  model = text_model('abcdefgh', eos_token_ids=[7])
  draft = model if draft == 'itself' else draft
  decoder = ss.Decoder(model, draft, run_ahead=run_ahead)

  def one(prompt, **sampling):
    result = run(decoder, [request_of(letters(prompt), **sampling)])[0]
    assert result.stats.new_tokens == len(result.token_ids)
    tokens = ''.join('abcdefgh'[t] for t in result.token_ids)
    return result.text, tokens, result.finish_reason

  assert one('abcdefghab') == ('cdefg', 'cdefgh', 'stop')
  assert one('a', stop=('de',)) == ('bc', 'bcde', 'stop')
  assert one('a', stop=('zz', 'c')) == ('b', 'bc', 'stop')
  assert one('a', max_new_tokens=3) == ('bcd', 'bcd', 'length')
  assert one('a', max_new_tokens=1) == ('b', 'b', 'length')
  assert one('g') == ('', 'h', 'stop')  # the first token ends it
  text, tokens, reason = one('a', ignore_eos=True, max_new_tokens=12)
  assert (text, reason) == ('bcdefghabcde'[:12], 'length')
  assert tokens == text


def test_context_limit_ends_a_request():
  model = text_model('ab', max_context=20)
  for draft in (None, model, ss.PromptLookup()):
    request = request_of(letters('ab' * 8), max_new_tokens=None)
    result = run(ss.Decoder(model, draft), [request])[0]
    assert (len(result.token_ids), result.finish_reason) == (4, 'length')


def test_logprobs_are_those_of_the_model():
  table = markov_table(4, seed=2)
  model = testing.table_model(table)
  for draft in (None, ss.PromptLookup(prompt_lookup_min=1)):
    request = request_of(
      (0, 1, 0, 1),
      temperature=0.5,
      top_k=2,
      logprobs=True,
      top_logprobs=2,
      max_new_tokens=9,
      seed=4,
    )
    result = run(ss.Decoder(model, draft), [request])[0]
    steps = zip((1, *result.token_ids), result.token_ids, strict=False)
    expected = [np.log(table[a, b]) for a, b in steps]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)
    before = (1, *result.token_ids[:-1])
    for token, top in zip(before, result.top_logprobs, strict=True):
      best = np.argsort(-table[token], kind='stable')[:2]
      assert [i for i, _ in top] == best.tolist()
      np.testing.assert_allclose(
        [value for _, value in top], np.log(table[token, best]), atol=1e-5
      )


@functools.cache
def greedy_requests():
  """Requests of all kinds, and what plain decoding says of them one by one."""
  plain, adjusted = requests_of(4), []
  for params in (
    {'repetition_penalty': 1.8},
    {'presence_penalty': 1.5, 'frequency_penalty': -0.5},
    {'banned_token_ids': (5, 6), 'logit_bias': {9: 2.0}},
    {'forced_token_ids': (65, 66, 67)},
  ):
    adjusted += requests_of(4, **params)
  results = run(ORACLE, plain) + run(ORACLE, adjusted)
  expected = [result.token_ids for result in results]
  assert expected[-4][:3] == (65, 66, 67)[: len(expected[-4])]
  return plain + adjusted, expected


@pytest.mark.parametrize('draft', ['prompt_lookup', 'bad_draft'])
def test_a_row_depends_on_its_own_request_only(draft):
  """Same seed, same tokens, whatever else is in the batch."""
  greedy, expected = greedy_requests()
  drawn = requests_of(5, temperature=0.9, top_k=40, top_p=0.95, seed=1)
  requests = [*drawn, *greedy]
  decoder = ss.Decoder(TARGET, DRAFTS[draft], batch_size=3)
  together = [r.token_ids for r in run(decoder, requests)]
  reverse = [r.token_ids for r in run(decoder, requests[::-1])][::-1]
  assert together == reverse
  assert together[5:] == expected


def test_no_compilation_after_warmup():
  for draft in (None, DRAFTS['prompt_lookup'], BAD_DRAFT):
    decoder = ss.Decoder(TARGET, draft)
    decoder.warmup(300)
    with profiling.count_compilations() as counter:
      for length in (1, 2, 33, 70, 129, 200, 255, 270):
        run(decoder, [request_of((7,) * length, max_new_tokens=30)])
    assert counter.count == 0


def test_hot_loop_reads_nothing_implicitly():
  decoder = ss.Decoder(TARGET, DRAFTS['prompt_lookup'], batch_size=3)
  requests = requests_of(4)
  expected = run(decoder, requests)
  with jax.transfer_guard_device_to_host('disallow'):
    got = run(decoder, requests)
  assert_same(got, expected)


@pytest.mark.parametrize(
  ('draft', 'num_devices'),
  [(None, 2), (ss.PromptLookup(num_speculative_tokens=1), 1)],
)
def test_rows_that_ended_stand_still_on_the_device(draft, num_devices):
  """The first one ends by a stop string, the other one goes on."""
  model = text_model('abcdefgh', devices=jax.devices()[:num_devices])
  requests = [
    request_of((0,), stop=stop, max_new_tokens=50) for stop in (('d',), ())
  ]
  decoder = ss.Decoder(model, draft, batch_size=2)
  decoder.warmup(51)
  with profiling.count_compilations() as counter:
    results = run(decoder, requests)
  assert counter.count == 0
  assert [len(result.token_ids) for result in results] == [3, 50]
  short, long = sorted(decoder.engine._target.rows.lengths.tolist())
  # A round was on its way.
  assert short <= 4 + (1 if draft is None else 2)
  assert long == 51


def test_one_iterator_at_a_time():
  decoder = ss.Decoder(TARGET)
  request = requests_of(1, max_new_tokens=8, ignore_eos=True)[0]
  expected = run(decoder, [request])[0].token_ids
  first = decoder.run([request])
  next(first)
  for use in (lambda: list(decoder.run([request])), lambda: decoder.warmup(9)):
    with pytest.raises(errors.UserError, match='another iterator'):
      use()
  (result,) = (e.result for e in first if e.result)
  assert result.token_ids == expected  # and is not disturbed
  first = decoder.run([request])
  next(first)
  del first
  assert run(decoder, [request])[0].token_ids == expected


@pytest.mark.parametrize(
  ('num_devices', 'draft'), [(2, 'prompt_lookup'), (4, 'sharded')]
)
def test_tensor_parallel_decoding_gives_the_same_tokens(num_devices, draft):
  devices = jax.devices()[:num_devices]
  sharded = testing.random_model(CONFIG, seed=0, devices=devices)
  draft = {**DRAFTS, 'sharded': sharded}[draft]
  decoder = ss.Decoder(sharded, draft, batch_size=2)
  assert_same(run(decoder, requests_of(3)), plain_of(3))


def test_generate_and_stream():
  prompts = ['Hello', [{'role': 'user', 'content': 'Hi'}], [1, 2, 3]]
  results = ss.generate(TARGET, prompts, max_new_tokens=12)
  for prompt, result in zip(prompts, results, strict=True):
    assert len(result.token_ids) == 12
    pieces = list(ss.stream(TARGET, prompt, draft=TARGET, max_new_tokens=12))
    assert ''.join(pieces) == result.text
  single = ss.generate(TARGET, 'Hello', max_new_tokens=12)
  assert single[0].text == results[0].text
  assert ss.generate(TARGET, []) == []


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: ss.generate(TARGET, ['']), 'prompt is empty'),
    (lambda: ss.generate(TARGET, [[]]), 'prompt is empty'),
    (lambda: ss.generate(TARGET, [[999]]), '999'),
    (lambda: ss.generate(TARGET, [[1] * 512]), '512 tokens.*at most 512'),
    (lambda: ss.stream(TARGET, [1] * 600), '600 tokens'),
    (
      lambda: ss.generate(TARGET, ['a'], sampling=[ss.SamplingParams()] * 2),
      '1 prompts, but 2 sampling',
    ),
    (lambda: ss.Decoder(TARGET, batch_size=0), 'batch_size must be.* 1, got 0'),
    (lambda: ss.Decoder(TARGET, run_ahead=-1), 'run_ahead must be'),
    (
      lambda: ss.Decoder(TARGET, TARGET, num_speculative_tokens=0),
      'num_speculative_tokens must be at least 1, got 0',
    ),
    (
      lambda: ss.Decoder(TARGET, num_speculative_tokens=3),
      'num_speculative_tokens=3 is for drafts without a length',
    ),
    (
      lambda: ss.Decoder(
        TARGET, ss.PromptLookup(), policy='goodput', num_speculative_tokens=4
      ),
      'num_speculative_tokens=4 is for drafts without a length of their own',
    ),
    (
      lambda: ss.Decoder(TARGET, TARGET, policy='best'),
      "policy='best' must be 'goodput'",
    ),
    (
      lambda: ss.PromptLookup(prompt_lookup_min=3, prompt_lookup_max=2),
      'got 3 and 2',
    ),
    (lambda: ss.Decoder(TARGET, text_model('ab')), 'target.*table'),
    (
      lambda: ss.Decoder(
        TARGET, testing.random_model(CONFIG, devices=jax.devices()[1:2])
      ),
      'other devices',
    ),
  ],
)
def test_bad_input_is_refused_before_any_work(call, message):
  with pytest.raises(ss.UserError, match=message):
    call()


LEFT = """
import swiftspec_jax as ss
from decoding_cases import CONFIG, requests_of
from swiftspec_jax import testing
from swiftspec_jax.engine import background
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.step.program_sizes import ProgramSizes

model = testing.random_model(CONFIG, seed=0, name='target')
(request,) = requests_of(1, max_new_tokens=400)

def updates():
  buckets = StepBuckets(rows=(1,), query_tokens=(1, 32))
  sizes = ProgramSizes.of_rows(buckets, 512)
  with background.running(Engine(model, sizes=sizes)) as engine:
    yield from engine.submit(request)

left = [
  ss.Decoder(model).run([request]),
  ss.Decoder(model, ss.SuffixLookup()).run([request]),
  updates(),
]
for iterator in left:
  next(iterator)
print('done')
"""


# Iterators are closed before finalizers take traces apart.
LAST = """
import weakref
from swiftspec_jax.engine import left_iterators

@left_iterators.closed_at_exit
def numbers():
  try:
    yield 1
  finally:
    print('closed')

next(left := numbers())
weakref.finalize(left_iterators, print, 'finalized')
"""


@pytest.mark.parametrize(
  ('code', 'output'), [(LEFT, 'done\n'), (LAST, 'closed\nfinalized\n')]
)
def test_a_program_may_leave_iterators(code, output):
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=pathlib.Path(__file__).parent,
    env={**programs.environment(), 'PYTHONPATH': str(programs.ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, output, '')
