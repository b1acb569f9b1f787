"""The choice by goodput: golden values, allocation, padding and memory.

Numbers of items are those of the SmartSpec checklist of this project; the
golden values follow from the published H100 coefficients.
"""

import dataclasses
import itertools
import types

import numpy as np
import pytest
import serving_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec_jax import policies
from swiftspec_jax.policies import allocation, search
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.simulator import best_nodes

BATCHES = (1, 4, 16, 64, 128, 256, 512)


def plan(costs, acceptance, view, coverage=1.0):
  return Goodput(costs, cases.Oracle(acceptance, coverage)).plan_draft(view)


def chosen_length(costs, acceptance, num_rows, kv_length):
  view = cases.make_view(
    num_rows, cases.unpadded(num_rows), kv_lengths=kv_length
  )
  lengths = plan(costs, acceptance, view).lengths
  assert (lengths == lengths[0]).all()
  return int(lengths[0])


def expected_tokens(acceptance, length, num_rows, num_drafting):
  """What the search makes of gains, for one length."""
  view = cases.make_view(
    num_rows,
    cases.unpadded(num_rows, max(length, 1)),
    limits=np.where(np.arange(num_rows) < num_drafting, length, 0),
  )
  gains = cases.Oracle(acceptance).gains(view)
  gains *= np.arange(len(gains))[:, None] < view.limits
  costs = cases.linear_costs()  # all tokens are free
  candidates = np.array([length])
  scores = search.score(
    view, gains, costs, lengths=candidates, draft_steps=candidates
  )
  return float(scores.expected_tokens[0])


@pytest.mark.parametrize(
  ('acceptance', 'length', 'num_rows', 'num_drafting', 'expected'),
  [
    (0.7, 3, 1, 1, 2.533),
    (0.5, 5, 4, 3, 6.90625),
    (0.7, 0, 5, 5, 5.0),
    (0.0, 4, 3, 2, 3.0),
    (1.0, 4, 3, 2, 11.0),
    (1 - 1e-9, 4, 3, 2, 11.0),
  ],
)
def test_expected_tokens(acceptance, length, num_rows, num_drafting, expected):
  """Item 1."""
  found = expected_tokens(acceptance, length, num_rows, num_drafting)
  assert found == pytest.approx(expected, abs=1e-6)
  closed = cases.geometric_tokens(acceptance, length, num_rows, num_drafting)
  assert closed == pytest.approx(expected, abs=1e-6)


def test_curve():
  """Item 3."""
  golden = [2305.9, 3160.0, 3739.8, 4000.2, 4073.1, 4037.5, 3941.4, 3813.5]
  found = cases.curve(cases.EAGLE_8B, 0.7, 16, 512)
  np.testing.assert_allclose(found, golden, atol=0.05)
  found = plan(cases.EAGLE_8B, 0.7, cases.make_view(16, cases.unpadded(16)))
  assert found.lengths.tolist() == [4] * 16
  goodput = found.expected_tokens / found.expected_seconds
  assert goodput == pytest.approx(4073.1, abs=0.05)


@pytest.mark.parametrize(
  ('costs', 'acceptance', 'golden'),
  [
    (cases.EAGLE_8B, 0.3, (2, 2, 1, 0, 0, 0, 0)),
    (cases.EAGLE_8B, 0.5, (3, 3, 2, 1, 0, 0, 0)),
    (cases.EAGLE_8B, 0.7, (5, 5, 4, 3, 2, 0, 0)),
    (cases.EAGLE_8B, 0.9, (7, 7, 7, 6, 5, 0, 0)),
    (cases.LOOKUP_70B, 0.3, (4, 3, 2, 1, 0, 0, 0)),
    (cases.LOOKUP_70B, 0.5, (7, 5, 3, 2, 1, 0, 0)),
    (cases.LOOKUP_70B, 0.7, (7, 7, 5, 3, 2, 1, 0)),
    (cases.LOOKUP_70B, 0.9, (7, 7, 7, 7, 5, 3, 2)),
  ],
)
def test_best_length_by_batch(costs, acceptance, golden):
  """Items 4 and 6."""
  found = [chosen_length(costs, acceptance, b, 512) for b in BATCHES]
  assert found == list(golden)


def test_best_length_by_context():
  """Item 5."""
  contexts = (128, 512, 2048, 8192, 32768)
  found = [chosen_length(cases.EAGLE_8B, 0.7, 256, c) for c in contexts]
  assert found == [0, 0, 3, 6, 7]


def test_fewer_drafting_rows_do_not_lengthen_drafts():
  """Item 6."""
  longest = []
  for num_drafting in (16, 12, 8, 4, 1):
    limits = np.where(np.arange(16) < num_drafting, 7, 0)
    view = cases.make_view(16, cases.unpadded(16), limits=limits)
    longest.append(int(plan(cases.EAGLE_8B, 0.7, view).lengths.max()))
  assert longest == sorted(longest, reverse=True)
  assert longest[0] > longest[-1]


def test_monotone_costs_give_monotone_lengths():
  """Item 7."""
  costs = cases.EAGLE_8B.monotone()
  rates = (0.2, 0.4, 0.6, 0.8, 0.95)
  found = np.array(
    [[chosen_length(costs, a, b, 512) for b in BATCHES[:-1]] for a in rates]
  )
  assert (np.diff(found, axis=1) <= 0).all()
  assert (np.diff(found, axis=0) >= 0).all()


def test_the_search_does_not_stop_early():
  """Item 8: the first draft token does not pay for starting the draft."""
  view = cases.make_view(128, cases.unpadded(128))
  candidates = np.arange(8)
  scores = search.score(
    view,
    cases.Oracle(0.8).gains(view),
    cases.EAGLE_8B,
    lengths=candidates,
    draft_steps=candidates,
  )
  ratios = scores.goodput / scores.goodput[0]
  assert ratios[1] < 1.1
  assert ratios.argmax() == chosen_length(cases.EAGLE_8B, 0.8, 128, 512) == 3
  assert ratios[3] == pytest.approx(1.175, abs=5e-4)


@pytest.mark.parametrize(
  ('num_free_pages', 'num_spare_tokens', 'longest'),
  [(0, 0, 0), (0, 3, 3), (7, 0, 7), (8, 0, 7), (8, 16, 7)],
)
def test_drafts_fit_into_the_memory(num_free_pages, num_spare_tokens, longest):
  """Item 9: eight rows, pages of 16 tokens."""
  view = cases.make_view(
    8,
    cases.unpadded(8),
    num_free_pages=num_free_pages,
    num_spare_tokens=num_spare_tokens,
  )
  lengths = plan(cases.EAGLE_8B, 0.95, view).lengths
  np.testing.assert_array_equal(view.fitting(lengths), lengths)
  assert lengths.max() == longest


@pytest.mark.parametrize(
  ('num_free_pages', 'expected'),
  [
    (0, [0, 3, 5, 0, 5, 2]),
    (1, [5, 3, 5, 0, 5, 2]),
    (2, [5, 5, 5, 0, 5, 2]),
    (3, [5, 5, 5, 5, 5, 2]),
    (4, [5, 5, 5, 5, 5, 5]),
  ],
)
def test_rows_fill_the_pages_that_they_own(num_free_pages, expected):
  """Item 9: a row without room takes nothing from the others."""
  view = cases.make_view(
    6,
    cases.unpadded(6, 5),
    num_free_pages=num_free_pages,
    num_spare_tokens=[0, 3, 15, 0, 9, 2],
  )
  assert plan(cases.linear_costs(), 0.9, view).lengths.tolist() == expected
  assert view.shortened(np.full(6, 5)).tolist() == expected


def test_a_crowded_step_is_shared():
  """64 rows want 3 tokens; there is room for 60 and for 150 of 192."""
  buckets = cases.unpadded(64)
  wanted = np.full(64, 3)
  view = cases.make_view(64, buckets, max_draft_tokens=60)
  assert view.shortened(wanted).tolist() == [1] * 60 + [0] * 4
  view = cases.make_view(64, buckets, max_draft_tokens=150)
  assert view.shortened(wanted).tolist() == [3] * 22 + [2] * 42
  np.testing.assert_array_equal(view.with_drafts_first().shortened(wanted), 3)


def test_padding_is_used():
  """Item 11: whatever fits into the declared size is free; rows are padded."""
  buckets = StepBuckets(
    rows=(1, 2, 4),
    query_tokens=(4, 10, 32),
    lengths=tuple(range(8)),
    draft_steps=(0, 1, 1, 1, 1, 1, 1, 1),
  )
  costs = cases.linear_costs(query_tokens=0.0005)
  found = plan(costs, 0.6, cases.make_view(2, buckets))
  # More tokens are not worth the step of 32.
  assert found.lengths.tolist() == [4, 4]
  assert found.expected_seconds == pytest.approx(0.01 + 0.0005 * 10)
  assert plan(costs, 0.6, cases.make_view(4, buckets)).lengths.sum() == 6
  buckets = StepBuckets(rows=(4, 8), query_tokens=(8, 64), lengths=(0, 1))
  costs = cases.linear_costs(rows=0.001)
  found = plan(costs, 0.6, cases.make_view(3, buckets))
  assert found.expected_seconds == pytest.approx(0.01 + 0.004)


def test_tokens_go_to_the_rows_that_use_them():
  """Item 12."""
  rates = np.array([0.9, 0.6, 0.3])
  gains = rates ** np.arange(1, 11)[:, None]
  lengths = allocation.allocate(gains, 9)
  assert lengths.tolist() == [8, 1, 0]
  total = sum(gains[:k, i].sum() for i, k in enumerate(lengths))
  assert total == pytest.approx(5.726, abs=5e-4)
  # The authors' rule, in proportion to the rates, would be [5, 3, 2].
  view = cases.make_view(3, cases.unpadded(3, 10), max_draft_tokens=9)
  assert plan(cases.linear_costs(), rates, view).lengths.tolist() == [8, 1, 0]


def test_no_token_goes_where_none_must_be_drafted():
  gains = np.array([[0.0, 1e-6, 1e-7], [0.0, 1e-12, 0.0]])
  assert allocation.allocate(gains, 1).tolist() == [0, 1, 0]
  assert allocation.allocate(gains, 2).tolist() == [0, 1, 1]


def test_tokens_with_confidence_come_first():
  """Item 13."""
  confidences = np.array([[0.9, 0.6], [0.8, 0.6], [0.5, 0.6]])
  gains = confidences.cumprod(axis=0)
  assert allocation.allocate(gains, 3).tolist() == [2, 1]
  # A tie at .36: the earlier position wins.
  assert allocation.allocate(gains, 4).tolist() == [2, 2]


@settings(max_examples=60)
@given(
  st.lists(
    st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
    min_size=1,
    max_size=3,
  ),
  st.integers(0, 9),
)
def test_allocation_is_the_best_one(rows, num_tokens):
  """Item 13, against all allocations."""
  gains = np.array(rows).T.cumprod(axis=0)
  found = allocation.allocate(gains, num_tokens)
  totals = [
    sum(gains[:k, i].sum() for i, k in enumerate(lengths))
    for lengths in itertools.product(range(4), repeat=gains.shape[1])
    if sum(lengths) <= num_tokens
  ]
  total = sum(gains[:k, i].sum() for i, k in enumerate(found))
  assert found.sum() <= num_tokens
  assert total == pytest.approx(max(totals), abs=1e-4)


def test_verification_keeps_confident_tokens():
  """Item 13, in the policy: n is chosen by goodput."""
  buckets = StepBuckets(rows=(2,), query_tokens=(2, 5, 8), lengths=(0, 1, 2, 3))
  costs = cases.linear_costs(fixed=0.01, query_tokens=0.0025)
  confidences = np.array([[0.9, 0.6], [0.8, 0.6], [0.5, 0.6]])
  view = cases.make_view(2, buckets)
  asked = policies.DraftPlan(lengths=np.array([3, 3]))
  drafts = policies.Drafts(lengths=asked.lengths, confidences=confidences)
  found = Goodput(costs).plan_verify(view, asked, drafts)
  assert found.tolist() == [2, 1]


def test_best_nodes_of_a_tree():
  """Item 14: a sure draft makes the tree a chain."""
  np.testing.assert_allclose(best_nodes(0.9, 4)[1], 0.9 ** np.arange(1, 5))
  children, gains = best_nodes(0.5, 5)
  np.testing.assert_allclose(gains, [0.5, 0.25, 0.25, 0.125, 0.125])
  assert children[0].tolist() == [1, 2, 4, -1, -1, -1]
  assert children[1].tolist() == [3, 5, -1, -1, -1, -1]


def test_trees_have_the_size_that_pays():

  class KnownTree(cases.Oracle):
    def gains(self, view):
      _, by_place = best_nodes(0.7, 15)
      return np.repeat(by_place[:, None], view.num_rows, axis=1)

  costs = cases.EAGLE_8B.monotone()
  sizes = []
  for num_rows in (1, 8, 64):
    view = cases.make_view(num_rows, cases.TREE_BUCKETS)
    lengths = Goodput(costs, KnownTree(0.7)).plan_draft(view).lengths
    sizes.append(lengths.mean())
  assert sizes[0] > 7
  assert sizes == sorted(sizes, reverse=True)
  assert sizes[-1] < 5


def test_prompts_are_not_the_fault_of_drafts():
  """A chunk of a prompt hides neither the cost nor the gain of drafts."""
  costs = cases.EAGLE_8B.monotone()
  buckets = cases.unpadded(64, max_query_tokens=2048)
  alone = plan(costs, 0.7, cases.make_view(64, buckets)).lengths
  for num_prefill_tokens in (100, 1000, 1984):
    view = cases.make_view(
      64, buckets, num_prefill_tokens=num_prefill_tokens, max_draft_tokens=992
    )
    lengths = plan(costs, 0.7, view).lengths
    assert abs(lengths.mean() - alone.mean()) < 1


def test_the_token_budget_limits_drafts():
  """Item 33."""
  buckets = cases.unpadded(4, max_query_tokens=10)
  view = cases.make_view(4, buckets, num_prefill_tokens=6)
  assert plan(cases.linear_costs(), 0.9, view).lengths.sum() <= 6
  view = cases.make_view(4, cases.unpadded(4), max_draft_tokens=6)
  assert plan(cases.linear_costs(), 0.9, view).lengths.sum() == 6


def _full_step_goodput(acceptance, num_present):
  """Goodput of 4 rows with 0, 1, 2 and 3 tokens each, in plain Python.

  A step takes 10 ms, and 1 ms for each of at most 24 tokens, all of them used.
  """
  share = (0.01 + 0.001 * 24) / 24
  expected = [4 * sum(acceptance**i for i in range(k + 1)) for k in range(4)]
  seconds = [0.01 + 0.004 + 4 * k * share * num_present / 4 for k in range(4)]
  return np.divide(expected, seconds)


@pytest.mark.parametrize(
  ('acceptance', 'num_filling', 'num_waiting', 'best'),
  [
    (0.9, 1, 0, 3),
    (0.9, 2, 1, 2),
    (0.9, 2, 2, 1),
    (0.6, 1, 0, 1),
    (0.6, 2, 1, 0),
  ],
)
def test_drafts_take_room_from_prompts_where_goodput_says_so(
  acceptance, num_filling, num_waiting, best
):
  """All that are present wait for the prompts that drafts displace."""
  view = cases.make_view(
    4,
    cases.unpadded(4, 3, max_query_tokens=24),
    num_prefill_tokens=20,
    max_draft_tokens=1,
    num_filling=num_filling,
    num_waiting=num_waiting,
  )
  costs = cases.linear_costs(query_tokens=0.001)
  goodput = _full_step_goodput(acceptance, 4 + num_filling + num_waiting)
  assert goodput.argmax() == best
  found = plan(costs, acceptance, view)
  assert found.lengths.tolist() == [best] * 4
  planned = types.SimpleNamespace(plan_draft=lambda _: found)
  _, fitted = policies.ask(planned, view)
  assert fitted.lengths.tolist() == [best] * 4
  # The step is full, whatever is in it.
  assert found.expected_seconds == pytest.approx(0.01 + 0.001 * 24)


def test_rows_are_treated_by_their_acceptance():
  """Item 47: where tokens cost, the better rows get them."""
  rates = np.array([0.95, 0.3])[np.arange(64) % 2]
  view = cases.make_view(64, cases.unpadded(64))
  lengths = plan(cases.EAGLE_8B.monotone(), rates, view).lengths
  assert lengths[::2].min() > lengths[1::2].max()


def with_dear_drafts(costs):
  """To verify a draft takes half a second more."""
  target = dataclasses.replace(costs.target, speculative=0.5)
  return dataclasses.replace(costs, target=target)


@pytest.mark.parametrize(('acceptance', 'drafts'), [(0.6, True), (0.4, False)])
def test_a_lone_row_without_a_draft_takes_a_plain_step(acceptance, drafts):
  """Drafts of one token, found in every second step, cost half a plain step.

  (1 + 0.5 * 0.6) / (0.5 * 1 + 0.5 * 1.5) is more than one token a plain step,
  though 1.3 / 1.5 is not.
  """
  # Drafts that cost nothing would be looked for before the choice.
  costs = with_dear_drafts(cases.linear_costs(fixed=1.0, steps=1e-9))
  view = cases.make_view(1, cases.unpadded(1, 1))
  found = plan(costs, acceptance, view, coverage=0.5)
  assert bool(found.lengths.any()) == drafts
  expected = (1.3, 1.25) if drafts else (1.0, 1.0)
  actual = found.expected_tokens, found.expected_seconds
  assert actual == pytest.approx(expected)


def test_rows_that_are_not_asked_do_not_find_drafts():
  """One of four rows may have a draft: half of the steps are plain ones."""
  view = cases.make_view(4, cases.unpadded(4, 1), limits=[0, 0, 1, 0])
  scores = search.score(
    view,
    np.array([[0.0, 0.0, 0.6, 0.0]]),
    with_dear_drafts(cases.linear_costs(fixed=1.0)),
    lengths=np.array([0, 1]),
    draft_steps=np.array([0, 1]),
    coverage=0.5,
  )
  assert scores.expected_tokens.tolist() == pytest.approx([4, 4.3])
  assert scores.expected_seconds.tolist() == pytest.approx([1, 1.25])


@pytest.mark.parametrize(('acceptance', 'length'), [(0.6, 1), (0.4, 0)])
def test_free_drafts_are_looked_for_before_the_choice(acceptance, length):
  """To verify a draft costs half a plain step: 1.6 / 1.5 pays, 1.4 / 1.5 not.

  So little is known at first of how often there is one that nothing else would
  find out.
  """
  costs = with_dear_drafts(cases.linear_costs(fixed=1.0))
  policy = Goodput(costs, cases.Oracle(acceptance, coverage=0.01))
  view = cases.make_view(1, cases.unpadded(1, 1))
  asked = policy.plan_draft(view)
  assert asked.lengths.tolist() == [1]
  for found in (1, 0):
    drafts = policies.Drafts(lengths=np.array([found]))
    chosen = policy.plan_verify(view, asked, drafts)
    assert chosen.tolist() == [min(found, length)]
