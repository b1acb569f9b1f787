"""Sampling against plain numpy oracles that sort the vocabulary."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec_jax import errors
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.step import sampling as sampling_lib

VOCAB = 16


def oracle_distribution(logits, params):
  """Probabilities f64[V] of one row, by sorting."""
  logits = np.asarray(logits, np.float64)
  if params.temperature == 0:
    return np.eye(len(logits))[np.argmax(logits)]
  logits = logits / params.temperature
  if params.top_k:
    kth = np.sort(logits)[::-1][min(params.top_k, len(logits)) - 1]
    logits = np.where(logits >= kth, logits, -np.inf)
  probs = np.exp(logits - logits.max())
  probs /= probs.sum()
  if params.top_p < 1:
    order = np.argsort(-probs, kind='stable')
    before = np.cumsum(probs[order]) - probs[order]
    smallest = probs[order][before < params.top_p].min()
    probs = np.where(probs >= smallest, probs, 0)
  probs = np.where(probs >= params.min_p * probs.max(), probs, 0)
  return probs / probs.sum()


@jax.jit
def law_of_state(logits, state):
  return jax.nn.softmax(sampling_lib.distribution_logits(logits, state), -1)


def distribution(logits, batch, features=None):
  state = sampling_lib.make_state(batch, logits.shape[-1], features)
  return np.asarray(law_of_state(logits, state))


# A state with room for it has one for all parameters of a distribution.
ANY = SamplingParams(temperature=1.0, top_k=1, top_p=0.5, min_p=0.5)


@settings(max_examples=60)
@given(
  seed=st.integers(0, 10_000),
  temperature=st.sampled_from([0.3, 1.0, 1.7]),
  top_k=st.integers(0, VOCAB + 2),
  top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
  min_p=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_law_equals_oracle(seed, temperature, top_k, top_p, min_p):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(3, 2, VOCAB)).astype(np.float32) * 2
  odd = SamplingParams(
    temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
  )
  # Rows with other settings, among them a greedy one, must not disturb it.
  batch = [odd, SamplingParams(), SamplingParams(temperature=1.0)]
  got = distribution(logits, batch, [ANY])
  for row, params in enumerate(batch):
    for query in range(2):
      np.testing.assert_allclose(
        got[row, query],
        oracle_distribution(logits[row, query], params),
        atol=1e-5,
      )


def test_ties_are_kept_together():
  logits = np.asarray([[[3.0, 1.0, 1.0, 1.0, 0.0, -1.0]]], np.float32)
  got = distribution(logits, [SamplingParams(temperature=1.0, top_k=2)])
  assert (got[0, 0] > 0).tolist() == [True] * 4 + [False] * 2


def test_least_temperatures_are_greedy():
  """Logits over 1e-38 are infinite."""
  logits = np.array([[[3.0, -4.0, 2.0]]], np.float32)
  for temperature, want in ((1e-38, 0), (9.9e-6, 0), (1e-5, 1e-5)):
    params = SamplingParams(temperature=temperature)
    assert params.temperature == want
    rows = [params, SamplingParams(temperature=1.0)]
    got = distribution(np.repeat(logits, 2, axis=0), rows)
    np.testing.assert_array_equal(got[0, 0], [1, 0, 0])


def test_greedy_batch_has_no_trace_of_other_features():
  state = sampling_lib.make_state([SamplingParams()] * 2, VOCAB)
  assert len(jax.tree.leaves(state)) == 1  # the seeds


adjust_logits = jax.jit(sampling_lib.adjust_logits)


def adjust(logits, batch, history, lengths, drafts, prompt_lengths=None):
  return np.asarray(
    adjust_logits(
      logits,
      sampling_lib.make_state(batch, VOCAB),
      token_ids=history,
      lengths=lengths,
      prompt_lengths=lengths if prompt_lengths is None else prompt_lengths,
      draft_token_ids=drafts,
    )
  )


def test_repetition_penalty_sees_history_and_earlier_drafts():
  logits = np.full((2, 3, VOCAB), 2.0, np.float32)
  logits[:, :, 1] = -2.0
  batch = [SamplingParams(repetition_penalty=2.0), SamplingParams()]
  # Token 9 lies after the length and must not count.
  history = np.asarray([[0, 1, 9, 9], [0, 1, 9, 9]], np.int32)
  drafts = np.asarray([[4, 5], [4, 5]], np.int32)
  got = adjust(logits, batch, history, np.asarray([2, 2], np.int32), drafts)
  for query, seen in enumerate([{0, 1}, {0, 1, 4}, {0, 1, 4, 5}]):
    expected = logits[0, query].copy()
    for token in seen:
      expected[token] = 1.0 if expected[token] > 0 else -4.0
    np.testing.assert_array_equal(got[0, query], expected)
  np.testing.assert_array_equal(got[1], logits[1])


def test_presence_and_frequency_count_the_output_and_earlier_drafts():
  batch = [
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(frequency_penalty=-1.0),
    SamplingParams(),
  ]
  logits = np.ones((3, 3, VOCAB), np.float32)
  # A prompt of 2 tokens, an output of 3; what is after does not count.
  history = np.tile(np.asarray([0, 1, 1, 3, 3, 9], np.int32), (3, 1))
  got = adjust(
    logits,
    batch,
    history,
    np.full(3, 5, np.int32),
    np.tile(np.asarray([3, 0], np.int32), (3, 1)),
    np.full(3, 2, np.int32),
  )
  seen = [1, 3, 3], [1, 3, 3, 3], [1, 3, 3, 3, 0]
  for query, tokens in enumerate(seen):
    for row, params in enumerate(batch):
      expected = logits[row, query].copy()
      for token in set(tokens):
        expected[token] -= params.presence_penalty
        expected[token] -= params.frequency_penalty * tokens.count(token)
      np.testing.assert_array_equal(got[row, query], expected)


def test_bias_bans_and_forced_tokens():
  batch = [
    SamplingParams(
      logit_bias={3: 5.0}, banned_token_ids=(7,), forced_token_ids=(7, 2)
    )
  ]
  logits = np.zeros((1, 3, VOCAB), np.float32)
  # The prompt has 4 tokens: query 0 is the first output token.
  got = adjust(
    logits,
    batch,
    np.zeros((1, 8), np.int32),
    np.asarray([4], np.int32),
    np.zeros((1, 2), np.int32),
  )
  assert got[0, 0].argmax() == 7  # forced though banned
  assert np.isneginf(np.delete(got[0, 0], 7)).all()
  assert got[0, 1].argmax() == 2
  assert got[0, 2, 3] == 5.0
  assert np.isneginf(got[0, 2, 7])


def test_ends_are_banned_by_the_place_of_each_node():
  batch = [
    SamplingParams(min_tokens=3, stop_token_ids=(9,)),
    SamplingParams(min_tokens=2),
    SamplingParams(stop_token_ids=(9,)),
  ]
  # Token 16 is one that the model lacks. A prompt of 4 tokens, an output of 1.
  state = sampling_lib.make_state(batch, VOCAB, eos_token_ids=(2, VOCAB))
  depths = np.tile(np.asarray([0, 1, 1, 2], np.int32), (3, 1))
  got = adjust_logits(
    np.zeros((3, 4, VOCAB), np.float32),
    state,
    token_ids=np.zeros((3, 8), np.int32),
    lengths=np.full(3, 5, np.int32),
    prompt_lengths=np.full(3, 4, np.int32),
    draft_token_ids=np.zeros((3, 3), np.int32),
    depths=depths,
    ancestor_mask=np.ones((3, 4, 4), bool),
  )
  banned = [[np.flatnonzero(query).tolist() for query in row] for row in got]
  assert banned == [[[2, 9]] * 3 + [[]], [[2], [], [], []], [[]] * 4]


def test_noise_depends_on_seed_position_and_stream_only():
  seeds = np.uint32([3, 4])
  positions = np.int32([[10, 11], [11, 12]])

  @functools.partial(jax.jit, static_argnums=2)
  def keys(seeds, positions, stream):
    keys = sampling_lib.position_keys(seeds, positions, stream)
    return jax.random.key_data(keys)

  both = np.asarray(keys(seeds, positions, sampling_lib.Stream.OUTPUT))
  alone = np.asarray(keys(seeds[1:], positions[1:], sampling_lib.Stream.OUTPUT))
  np.testing.assert_array_equal(both[1], alone[0])
  other = np.asarray(keys(seeds, positions, sampling_lib.Stream.DRAFT))
  everything = np.concatenate([both.reshape(-1, 2), other.reshape(-1, 2)])
  assert len(np.unique(everything, axis=0)) == 8


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'temperature': -0.5}, 'temperature must be finite and >= 0, got -0.5'),
    ({'temperature': float('nan')}, 'temperature must be .* got nan'),
    ({'top_k': -1}, 'top_k must be >= 0'),
    ({'top_p': 0.0}, 'top_p must be in'),
    ({'min_p': 1.0}, 'min_p must be in'),
    ({'repetition_penalty': 0.0}, 'repetition_penalty must be'),
    ({'top_logprobs': 1}, 'top_logprobs must be 0 to 20'),
    ({'presence_penalty': 2.1}, 'presence_penalty must be in'),
    ({'frequency_penalty': -2.1}, 'frequency_penalty must be in'),
    ({'max_new_tokens': 0}, 'max_new_tokens must be >= 1'),
    ({'max_new_tokens': -3}, 'max_new_tokens must be .* got -3'),
    ({'min_tokens': -1}, 'min_tokens must be >= 0'),
    ({'min_tokens': 257}, 'min_tokens must be .* at most max_new_tokens'),
    ({'seed': -1}, 'seed must be in'),
    ({'stop': 'END'}, 'stop must be a sequence of non-empty strings'),
    ({'stop': ('',)}, 'stop must be a sequence of non-empty strings'),
  ],
)
def test_bad_values_are_refused(values, message):
  with pytest.raises(errors.UserError, match=message):
    SamplingParams(**values)


@pytest.mark.parametrize(
  'values',
  [
    {'logit_bias': {99: 1.0}},
    {'banned_token_ids': (16,)},
    {'forced_token_ids': (-1,)},
    {'stop_token_ids': (16,)},
  ],
)
def test_token_ids_outside_the_vocabulary_are_refused(values):
  with pytest.raises(errors.UserError, match='ids are 0 to 15'):
    SamplingParams(**values).check_vocabulary(VOCAB)
