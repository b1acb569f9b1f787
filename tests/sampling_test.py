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
from swiftspec_jax.step.sampling import SamplingLevel

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
def distribution_of(logits, state):
  return jax.nn.softmax(sampling_lib.distribution_logits(logits, state), -1)


def distribution(logits, batch):
  state = sampling_lib.make_state(
    batch, logits.shape[-1], SamplingLevel.TRUNCATED
  )
  return np.asarray(distribution_of(logits, state))


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
  got = distribution(logits, batch)
  for row, params in enumerate(batch):
    for query in range(2):
      want = oracle_distribution(logits[row, query], params)
      np.testing.assert_allclose(got[row, query], want, atol=1e-5)


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
  state = sampling_lib.make_state(
    [SamplingParams()] * 2, VOCAB, SamplingLevel.GREEDY
  )
  assert len(jax.tree.leaves(state)) == 1  # the seeds


adjust_logits = jax.jit(sampling_lib.adjust_logits)


def adjust(logits, batch, history, lengths, prompt_lengths, **ends):
  """Logits f32[B, V] of rows, after histories i32[B, S]."""
  state = sampling_lib.make_state(batch, VOCAB, SamplingLevel.ADJUSTED, **ends)
  adjusted = adjust_logits(
    logits[:, None],
    state,
    token_ids=np.asarray(history, np.int32),
    lengths=np.asarray(lengths, np.int32),
    prompt_lengths=np.asarray(prompt_lengths, np.int32),
  )
  return np.asarray(adjusted)[:, 0]


def test_repetition_penalty_sees_history():
  logits = np.full((2, VOCAB), 2.0, np.float32)
  logits[:, 1] = -2.0
  batch = [SamplingParams(repetition_penalty=2.0), SamplingParams()]
  # Token 9 lies after the length and must not count.
  got = adjust(logits, batch, [[0, 1, 4, 9]] * 2, [3, 3], [2, 2])
  expected = logits[0].copy()
  expected[[0, 1, 4]] = 1.0, -4.0, 1.0
  np.testing.assert_array_equal(got, [expected, logits[1]])


def test_presence_and_frequency_count_the_output():
  batch = [
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(frequency_penalty=-1.0),
    SamplingParams(),
  ]
  logits = np.ones((3, VOCAB), np.float32)
  # A prompt of 2 tokens, an output of 3; what is after does not count.
  got = adjust(logits, batch, [[0, 1, 1, 3, 3, 9]] * 3, [5] * 3, [2] * 3)
  expected = logits.copy()
  for row, params in enumerate(batch):
    expected[row, [1, 3]] -= params.presence_penalty
    expected[row, [1, 3]] -= params.frequency_penalty * np.array([1, 2])
  np.testing.assert_array_equal(got, expected)


def test_bias_bans_and_forced_tokens():
  params = SamplingParams(
    logit_bias={3: 5.0}, banned_token_ids=(7,), forced_token_ids=(7, 2)
  )
  # A prompt of 4 tokens, and outputs of none, one and two.
  zeros = np.zeros((3, VOCAB), np.float32)
  got = adjust(zeros, [params] * 3, np.zeros((3, 8)), [4, 5, 6], [4] * 3)
  assert got[0].argmax() == 7  # forced though banned
  assert np.isneginf(np.delete(got[0], 7)).all()
  assert got[1].argmax() == 2
  assert got[2, 3] == 5.0
  assert np.isneginf(got[2, 7])


def test_ends_are_banned_by_the_length_of_the_output():
  batch = [
    SamplingParams(min_tokens=3, stop_token_ids=(9,)),
    SamplingParams(min_tokens=2),
    SamplingParams(stop_token_ids=(9,)),
  ]
  # Token 16 is one that the model lacks. A prompt of 4 tokens.
  zeros, history = np.zeros((3, VOCAB), np.float32), np.zeros((3, 8))
  for num_output, banned in enumerate(
    ([[2, 9], [2], []], [[2, 9], [2], []], [[2, 9], [], []], [[], [], []])
  ):
    lengths = [4 + num_output] * 3
    got = adjust(
      zeros, batch, history, lengths, [4] * 3, eos_token_ids=(2, VOCAB)
    )
    assert [np.flatnonzero(row).tolist() for row in got] == banned


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
