"""Prompt lookup of the length that pays, against a loop in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_cases import assert_same, requests_of, run

import swiftspec_jax as ss
from swiftspec_jax import profiling, testing, types
from swiftspec_jax.drafting.texts import text_lookup
from swiftspec_jax.step import rows as rows_lib

SIZE = 32
DRAFTER = ss.AdaptiveLookup(num_speculative_tokens=7)
PRIOR = text_lookup.PROMPT_LOOKUP.prior
FLAT = (1.0, 1.02, 1.03)
STEEP = (1.0, 4.0, 8.0)
# In between: what a draft is worth decides.
USUAL = (1.0, 1.5, 2.0)


def test_lengths_make_steps_of_powers_of_two():
  """But for two tokens, which take as long as four."""
  assert DRAFTER.lengths == (0, 3, 7)
  assert ss.AdaptiveLookup(num_speculative_tokens=1).lengths == (0, 1)
  assert ss.AdaptiveLookup(num_speculative_tokens=3).lengths == (0, 3)
  assert ss.AdaptiveLookup(num_speculative_tokens=5).lengths == (0, 3, 5)


def test_impossible_length_is_refused():
  with pytest.raises(ss.UserError, match='at least 1, got 0'):
    ss.AdaptiveLookup(num_speculative_tokens=0)


def rows_of(texts, prompt_lengths=None):
  token_ids = np.zeros((len(texts), SIZE), np.int32)
  for row, text in zip(token_ids, texts, strict=True):
    row[: len(text)] = text
  lengths = np.array([len(text) for text in texts], np.int32)
  return {
    'token_ids': token_ids,
    'lengths': lengths,
    'prompt_lengths': lengths if prompt_lengths is None else prompt_lengths,
    'max_lengths': np.full_like(lengths, SIZE),
  }


def empty_state(batch_size):
  mesh = jax.sharding.Mesh(jax.devices()[:1], 'x')
  return DRAFTER.init(batch_size, SIZE, mesh)


def propose(rows, seconds, draft_state=None):
  if draft_state is None:
    draft_state = empty_state(len(rows['lengths']))
  state = types.DecodeState(
    **jax.tree.map(jnp.asarray, rows),
    target_cache=None,
    draft_state=draft_state,
    sampling=None,
  )
  return _propose(jnp.asarray(seconds, jnp.float32), state)


@jax.jit
def _propose(seconds, state):
  return DRAFTER.propose(seconds, state)


def best_length(matches, seconds):
  """Matches of the rows; 0 where there is none."""
  best = (1.1 * len(matches) / seconds[0], 0)
  for length, cost in zip(DRAFTER.lengths[1:], seconds[1:], strict=True):
    num_tokens = len(matches)
    for match in matches:
      reached = 1.0 if match else 0.0
      for depth in range(length):
        reached *= PRIOR[match + depth - 1]
        num_tokens += reached
    best = max(best, (num_tokens / cost, length))
  return best[1]


# The last 0, 1, 2, 3 and 4 tokens have been there before.
TEXTS = [
  [1, 2, 3, 4, 5],
  [1, 2, 3, 4, 5, 9, 3],
  [1, 2, 3, 4, 5, 9, 2, 3],
  [1, 2, 3, 4, 5, 9, 1, 2, 3],
  [8, 1, 2, 3, 4, 5, 9, 8, 1, 2, 3],
]


@pytest.mark.parametrize('seconds', [FLAT, USUAL, STEEP])
@pytest.mark.parametrize('match', range(5))
def test_length_has_the_most_expected_tokens_per_second(seconds, match):
  proposal, _ = propose(rows_of([TEXTS[match]]), seconds)
  assert proposal.num_drafted[0] == best_length([match], seconds)
  if match:
    assert proposal.token_ids[0, :2].tolist() == [4, 5]


def test_rows_decide_together_and_those_without_a_match_draft_nothing():
  for seconds in (FLAT, USUAL, STEEP):
    proposal, _ = propose(rows_of([TEXTS[0], TEXTS[4], TEXTS[2]]), seconds)
    best = best_length([0, 4, 2], seconds)
    assert proposal.num_drafted.tolist() == [0, best, best]


def test_seconds_can_force_each_length_on_idle_rows():
  rows = rows_of([[], []])
  rows['max_lengths'] = np.zeros(2, np.int32)
  for length in DRAFTER.lengths:
    proposal, _ = propose(rows, DRAFTER.forcing(length))
    assert proposal.num_drafted.tolist() == [length, length]


def test_drafts_that_are_wrong_end_and_a_new_request_begins_anew():
  """A text that alternates where the text before it never did."""
  text = [5, 1]
  draft_state, lengths = None, []
  rng = np.random.default_rng(0)
  for _ in range(14):
    text += [5, int(rng.integers(6, 99))]
    # The last token is 5, behind which stood another one each time.
    rows = rows_of([text[:-1]], prompt_lengths=np.array([2], np.int32))
    proposal, draft_state = propose(rows, USUAL, draft_state)
    lengths.append(int(proposal.num_drafted[0]))
  rates = draft_state.num_right / draft_state.num_tried
  assert rates[0, 0, 0] < PRIOR[0] / 2
  # A request is admitted with the empty state of a row of its own.
  draft_state = rows_lib.insert_row(draft_state, empty_state(1), jnp.int32(0))
  _, draft_state = propose(rows_of([TEXTS[2]]), USUAL, draft_state)
  np.testing.assert_allclose(
    draft_state.num_right / draft_state.num_tried, [[PRIOR]], rtol=1e-6
  )


def timed(seconds, *args, **kwargs):
  """A decoder that takes these for the seconds of its steps."""
  decoder = ss.Decoder(*args, **kwargs)
  seconds = jnp.asarray(seconds, jnp.float32)
  decoder.pipeline._measure_steps = lambda capacity: seconds
  return decoder


@pytest.mark.parametrize('seconds', [FLAT, USUAL], ids=['flat', 'usual'])
def test_output_is_that_of_plain_decoding(seconds):
  """Greedy and sampled, with log-probabilities; rows come and go."""
  requests = [
    *requests_of(4, max_new_tokens=60),
    *requests_of(3, temperature=0.5, top_k=2, max_new_tokens=60),
  ]
  target = testing.table_model(peaked_table())
  decoder = timed(seconds, target, DRAFTER, batch_size=3)
  results = run(decoder, requests)
  assert_same(results, run(ss.Decoder(target), requests))
  assert sum(result.stats.num_accepted for result in results) > 50


@functools.cache
def peaked_table(size=262, best=0.9):
  """Behind each token, one of a cycle of 6 is likely."""
  table = np.full((size, size), (1 - best) / (size - 1))
  table[np.arange(size), (np.arange(size) + 1) % 6] = best
  return table


def test_a_text_that_repeats_is_copied_and_no_other_is_drafted():
  cycle = np.eye(32)[[1, 2, 3, 4, 0, *range(6, 32), 5]]
  target = testing.table_model(cycle)
  sampling = ss.SamplingParams(max_new_tokens=81)
  copied = ss.Request(token_ids=(0, 1, 2, 3, 4, 0, 1), sampling=sampling)
  new = ss.Request(
    token_ids=(5, 6), sampling=ss.SamplingParams(max_new_tokens=20)
  )
  decoder = timed(USUAL, target, DRAFTER)
  first, second = run(decoder, [copied, new])
  assert first.stats.num_rounds <= 81 // 8 + 3
  assert second.stats.num_drafted == 0


def test_step_times_are_measured_once_and_warmup_compiles_everything():
  target = testing.table_model(peaked_table())
  decoder = ss.Decoder(target, DRAFTER)
  pipeline = decoder.pipeline
  pipeline.prepare(200, [ss.SamplingParams()])
  state = pipeline._rows.state
  # Steps behind half a cache were timed, and then the rows are empty again.
  assert state.draft_state.lengths.tolist() == [pipeline.capacity // 2]
  assert state.lengths.tolist() == state.target_cache.kv_lengths.tolist() == [0]
  decoder.warmup(200)
  seconds = np.asarray(decoder.pipeline._draft_params)
  assert seconds.shape == (3,)
  assert (seconds > 0).all()
  with profiling.count_compilations() as compilations:
    run(decoder, requests_of(4))
  assert compilations.count == 0
  np.testing.assert_array_equal(decoder.pipeline._draft_params, seconds)
