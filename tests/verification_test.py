"""Chain verification: hand tables, padded twins, and the output
distribution."""

import itertools
import math

import jax
import numpy as np
import pytest
from decoding_test import markov_table
from jax.experimental.pallas import tpu as pltpu
from sampling_test import oracle_law

from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import spec_step, testing, types, verification
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.drafting.draft_model import DraftModel
from swiftspec_jax.pipelines.target_rows import TargetRows

VOCAB = 5
END = types.PLACEHOLDER_TOKEN_ID


decide = jax.jit(verification.verify, static_argnames='kernels')


def greedy_logits(best):
  """Logits [B, T, V] whose best tokens are `best`."""
  return np.eye(VOCAB, dtype=np.float32)[np.asarray(best)] * 3


def positions_of(logits, start=10):
  """Positions i32[B, T] of logits [B, T, V]."""
  rows, size = logits.shape[:2]
  return np.tile(np.arange(start, start + size, dtype=np.int32), (rows, 1))


def many_rows(num_rows, params, features=None):
  """The state of rows whose seeds alone differ."""
  state = jax.tree.map(
    lambda x: np.repeat(x, num_rows, axis=0),
    sampling_lib.make_state([params], VOCAB, features),
  )
  return state.replace(seeds=np.arange(num_rows, dtype=np.uint32))


@jax.jit
def draw(logits, positions, state):
  """Tokens i32[B, T] that a draft with these logits draws, and its
  distributions."""
  law = sampling_lib.law_logits(logits, state)
  keys = sampling_lib.position_keys(
    state.seeds, positions, sampling_lib.Stream.DRAFT
  )
  return sampling_lib.draw(law, keys), jax.nn.softmax(law, -1)


HAND_TABLE = {
  # name: (drafts, number that count, target's best tokens, output)
  'all_accepted': ([1, 2, 3], 3, [1, 2, 3, 4], [1, 2, 3, 4]),
  'early_mismatch': ([0, 2, 3], 3, [1, 2, 3, 4], [1, END, END, END]),
  'late_mismatch': ([1, 2, 0], 3, [1, 2, 3, 4], [1, 2, 3, END]),
  'match_behind_mismatch': ([0, 2, 3], 3, [4, 2, 3, 1], [4, END, END, END]),
  'nothing_drafted': ([1, 2, 3], 0, [1, 2, 3, 4], [1, END, END, END]),
  'padded_drafts': ([1, 2, 3], 2, [1, 2, 3, 4], [1, 2, 3, END]),
}


@pytest.mark.parametrize('case', HAND_TABLE)
@pytest.mark.parametrize('use_rejection', [False, True])
def test_greedy_hand_table(case, use_rejection):
  drafts, num_drafted, best, output = HAND_TABLE[case]
  # A second, sampled row makes rejection sampling verify the greedy one.
  batch = [SamplingParams(), SamplingParams(temperature=float(use_rejection))]
  proposal = types.Proposal(
    token_ids=np.asarray([drafts] * 2, np.int32),
    num_drafted=np.asarray([num_drafted] * 2, np.int32),
    probs=np.eye(VOCAB, dtype=np.float32)[[drafts] * 2],
  )
  logits = greedy_logits([best] * 2)
  state = sampling_lib.make_state(batch, VOCAB)
  verdict = decide(proposal, logits, positions_of(logits), state)
  assert verdict.token_ids[0].tolist() == output
  assert verdict.num_accepted[0] == sum(t != END for t in output) - 1


def test_no_drafts_at_all_is_plain_decoding():
  proposal = types.Proposal(
    token_ids=np.zeros((2, 0), np.int32), num_drafted=np.zeros(2, np.int32)
  )
  logits = greedy_logits([[3], [1]])
  state = sampling_lib.make_state([SamplingParams()] * 2, VOCAB)
  verdict = decide(proposal, logits, positions_of(logits), state)
  assert verdict.token_ids.tolist() == [[3], [1]]


def chi_square(counts, probs):
  """Statistic and a bound that chance exceeds once in 10^5."""
  expected = probs * counts.sum()
  assert counts[expected == 0].sum() == 0
  counts, expected = counts[expected > 0], expected[expected > 0]
  freedom = len(expected) - 1
  statistic = ((counts - expected) ** 2 / expected).sum()
  # Wilson-Hilferty approximation of the quantile.
  width = 2 / (9 * freedom)
  bound = freedom * (1 - width + 4.27 * width**0.5) ** 3
  return statistic, bound


PLAIN = SamplingParams(temperature=1.0)
TOP_K = SamplingParams(temperature=0.7, top_k=3)
TOP_P = SamplingParams(temperature=1.3, top_p=0.8)
# One program for both.
CUT = TOP_K, TOP_P


@pytest.mark.parametrize('is_one_hot', [False, True])
@pytest.mark.parametrize(
  ('params', 'num_drafted'),
  [(PLAIN, 3), (PLAIN, 2), (PLAIN, 0), (TOP_K, 3), (TOP_P, 3), (TOP_P, 0)],
  ids=['plain-3', 'plain-2', 'plain-0', 'top_k-3', 'top_p-3', 'top_p-0'],
)
def test_rejection_keeps_the_target_law(params, num_drafted, is_one_hot):
  """Over many seeds: the distributions of the first and second output token.

  The target's distribution at each place is fixed here, so the second token,
  where there is one, must follow the distribution of its place whatever the
  first was.
  """
  num_rows, num_tokens = 10_000, 3
  rng = np.random.default_rng(1)
  target_logits = rng.normal(size=(num_tokens + 1, VOCAB)).astype(np.float32)
  draft_logits = rng.normal(size=(num_tokens + 1, VOCAB)).astype(np.float32)
  state = many_rows(num_rows, params, CUT if params in CUT else None)
  logits = np.tile(target_logits, (num_rows, 1, 1))
  positions = positions_of(logits, start=7)
  if is_one_hot:  # as prompt lookup drafts
    best = target_logits[0].argmax()
    drafts, probs = np.full((num_rows, num_tokens), best, np.int32), None
  else:
    draft_logits = np.tile(draft_logits, (num_rows, 1, 1))
    drafts, probs = (
      np.asarray(x)[:, :-1] for x in draw(draft_logits, positions, state)
    )
  proposal = types.Proposal(
    token_ids=drafts,
    num_drafted=np.full(num_rows, num_drafted, np.int32),
    probs=probs,
  )
  verdict = decide(proposal, logits, positions, state)
  law = [oracle_law(row, params) for row in target_logits]

  tokens = np.asarray(verdict.token_ids)
  statistic, bound = chi_square(
    np.bincount(tokens[:, 0], minlength=VOCAB), law[0]
  )
  assert statistic < bound
  if num_drafted == 0:
    assert (np.asarray(verdict.num_accepted) == 0).all()
    return
  second = tokens[:, 1]
  has_second = second != END
  assert has_second.mean() > 0.05
  # Given that there is a second token, its distribution is the target's.
  statistic, bound = chi_square(
    np.bincount(second[has_second], minlength=VOCAB), law[1]
  )
  assert statistic < bound
  assert (np.asarray(verdict.num_accepted) <= num_drafted).all()


def test_equal_laws_accept_everything():
  num_rows = 10_000
  logits = np.random.default_rng(0).normal(size=(4, VOCAB))
  logits = np.tile(logits.astype(np.float32), (num_rows, 1, 1))
  positions = positions_of(logits)
  state = many_rows(num_rows, PLAIN)
  drafts, probs = (
    np.asarray(x)[:, :-1] for x in draw(logits, positions, state)
  )
  proposal = types.Proposal(
    token_ids=drafts, num_drafted=np.full(num_rows, 3, np.int32), probs=probs
  )
  verdict = decide(proposal, logits, positions, state)
  assert (np.asarray(verdict.num_accepted) == 3).all()


def test_kernels_decide_as_the_reference():
  num_rows = 100
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(num_rows, 3, VOCAB)).astype(np.float32)
  proposal = types.Proposal(
    token_ids=rng.integers(0, VOCAB, (num_rows, 2), np.int32),
    num_drafted=rng.integers(0, 3, num_rows, np.int32),
    probs=np.full((num_rows, 2, VOCAB), 1 / VOCAB, np.float32),
  )
  state = many_rows(num_rows, PLAIN)
  arguments = (proposal, logits, positions_of(logits), state)
  want = decide(*arguments)
  with pltpu.force_tpu_interpret_mode():
    got = decide(*arguments, kernels='pallas_tpu')
  assert set(want.num_accepted.tolist()) == {0, 1, 2}
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_whole_steps_of_a_drawn_chain_follow_the_target_law():
  """All sequences of three tokens, over 20,000 rows of one batch."""
  num_rows, size, length = 20_000, 3, 3
  tables = markov_table(size, seed=0), markov_table(size, seed=5)
  target, draft = map(testing.table_model, tables)
  drafter = DraftModel(
    config=draft.config, dtype_name='float32', num_speculative_tokens=2
  )
  rows = TargetRows(
    target, drafter, draft.params, batch_size=num_rows, num_query_tokens=3
  )
  rows.prepare(length + 1, [PLAIN])
  ones = np.ones(num_rows, np.int32)
  # The prompt is token 0. The models have no layers, so nothing is cached.
  news = {
    'lengths': ones,
    'prompt_lengths': ones,
    'max_lengths': ones + length,
    'sampling': many_rows(num_rows, PLAIN),
  }
  place = rows.state.lengths.sharding
  state = rows.state.replace(**jax.device_put(news, place))
  for _ in range(length):
    state, _ = spec_step.decode_step(
      target.params,
      draft.params,
      state,
      config=target.config,
      drafter=drafter,
    )
  assert (np.asarray(state.lengths) == length + 1).all()
  outputs = np.asarray(state.token_ids[:, 1 : length + 1])
  counts = np.bincount(outputs @ [9, 3, 1], minlength=size**length)

  def law_of(table):
    sequences = itertools.product(range(size), repeat=length)
    return np.array(
      [
        math.prod(table[a, b] for a, b in itertools.pairwise((0, *tokens)))
        for tokens in sequences
      ]
    )

  statistic, bound = chi_square(counts, law_of(tables[0]))
  assert statistic < bound
  # The test would notice a share of drafts that is let through.
  mixed = 0.9 * law_of(tables[0]) + 0.1 * law_of(tables[1])
  statistic, bound = chi_square(counts, mixed)
  assert statistic > bound
