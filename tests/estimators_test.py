"""What is learned of acceptance. Items are those of the SmartSpec checklist."""

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax import policies
from swiftspec_jax.policies import allocation
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.calibration import (
  Calibration,
  NodeCalibration,
)
from swiftspec_jax.policies.prediction.estimators import (
  ChainEstimator,
  TreeEstimator,
)
from swiftspec_jax.simulator import TreeAcceptance, best_nodes

BUCKETS = cases.unpadded(256)


def show(estimator, step, lengths, accepted, buckets=BUCKETS, **outcome):
  """Has a step observed; returns its view."""
  view = cases.make_view(len(lengths), buckets, step=step)
  estimator.observe(cases.make_outcome(view, lengths, accepted, **outcome))
  return view


def feed(
  estimator, acceptance, num_steps, *, num_rows=64, length=None, first=0
):
  """Steps of drafts of `length`, by default of 1 to 7 at random."""
  generator = np.random.default_rng(first)
  for step in range(first, first + num_steps):
    lengths = generator.integers(1, 8, num_rows)
    if length is not None:
      lengths[:] = length
    accepted = cases.draw_accepted(generator, acceptance, lengths)
    show(estimator, step, lengths, accepted)


def pooled(estimator):
  """The gains of a request that nothing is known of."""
  view = cases.make_view(1, BUCKETS, request_ids=[10**6])
  return estimator.gains(view)[:, 0]


def test_the_rate_has_no_bias():
  """Item 15, beside the ratio that has."""
  acceptance = 0.7
  estimator, naive = ChainEstimator(), cases.NaiveRatio()
  feed(estimator, acceptance, 400, num_rows=256)
  assert estimator.acceptance_rate == pytest.approx(acceptance, abs=0.01)
  survival = acceptance ** np.arange(1, 8)
  np.testing.assert_allclose(pooled(estimator), survival, atol=0.02)
  feed(naive, acceptance, 1, num_rows=256, length=5)
  assert naive.acceptance < acceptance - 0.1


@pytest.mark.parametrize(
  ('acceptance', 'ratios'),
  [
    (0.7, (0.7, 0.595, 0.511, 0.388, 0.306)),
    (0.9, (0.9, 0.855, 0.813, 0.737, 0.671)),
  ],
)
def test_drafts_of_any_one_length_tell_the_rate(acceptance, ratios):
  """Item 15: where accepted over drafted tokens is off as in the table."""
  for length, ratio in zip((1, 2, 3, 5, 7), ratios, strict=True):
    estimator, average = ChainEstimator(), cases.Average()
    for learner in (estimator, average):
      feed(learner, acceptance, 60, num_rows=256, length=length)
    assert average.acceptance == pytest.approx(ratio, abs=0.02)
    assert estimator.acceptance_rate == pytest.approx(acceptance, abs=0.015)


def test_a_whole_draft_is_no_rejection():
  """Item 16."""
  rates = []
  for accepted in (4, 3):
    estimator = ChainEstimator()
    for step in range(20):
      show(estimator, step, [4], [accepted])
    rates.append(estimator.acceptance_rate)
  assert rates[0] > 0.95
  assert rates[1] == pytest.approx(0.75, abs=0.02)


def test_tokens_that_were_not_verified_do_not_count():
  """Item 17."""
  truncated, short = ChainEstimator(), ChainEstimator()
  for step in range(50):
    show(truncated, step, [2], [2], drafted=[7])
    show(short, step, [2], [2])
  assert truncated.acceptance_rate == short.acceptance_rate > 0.95


def test_a_change_is_followed():
  """Item 18, where the average since the start does not notice."""
  estimator, average = ChainEstimator(), cases.Average()
  for acceptance, num_steps, first in ((0.9, 1000, 0), (0.3, 500, 1000)):
    for learner in (estimator, average):
      feed(learner, acceptance, num_steps, num_rows=10, length=1, first=first)
  assert estimator.acceptance_rate < 0.4
  assert average.acceptance == pytest.approx(0.7, abs=0.02)


def test_positions_that_are_not_drafted_follow_the_others():
  """Item 19."""
  estimator = ChainEstimator()
  feed(estimator, 0.9, 300, length=7)
  feed(estimator, 0.3, 600, length=1, first=300)
  gains = pooled(estimator)
  assert gains[0] == pytest.approx(0.3, abs=0.05)
  assert gains[4] < 0.08
  assert (np.diff(gains) <= 0).all()


def test_positions_may_differ():
  """Conditional acceptance of a block drafter rises; one rate would miss it."""
  survival = np.array([0.78, 0.58, 0.43, 0.33, 0.27, 0.22, 0.19])
  generator = np.random.default_rng(0)
  estimator = ChainEstimator()
  for step in range(300):
    luck = generator.random(128)
    accepted = (luck[:, None] < survival).sum(axis=1)
    lengths = generator.integers(1, 8, 128)
    show(estimator, step, lengths, np.minimum(accepted, lengths))
  np.testing.assert_allclose(pooled(estimator), survival, atol=0.03)


def test_requests_are_told_apart():
  """Item 47, and a new request in an old slot starts from the others."""
  rates = np.array([0.5, 0.9])[np.arange(64) % 2]
  estimator = ChainEstimator()
  feed(estimator, rates, 300, length=5)
  gains = estimator.gains(cases.make_view(64, BUCKETS))[:5]
  expected = np.array([0.5, 0.9]) ** np.arange(1, 6)[:, None]
  found = np.stack([gains[:, ::2].mean(axis=1), gains[:, 1::2].mean(axis=1)], 1)
  np.testing.assert_allclose(found, expected, atol=0.08)
  view = cases.make_view(64, BUCKETS, request_ids=np.arange(64) + 64)
  new = estimator.gains(view)[0]
  assert (new == new[0]).all()
  assert 0.6 < new[0] < 0.8


def test_equal_requests_stay_alike():
  """Item 47: shrinkage hides the noise of single requests."""
  estimator = ChainEstimator()
  feed(estimator, 0.7, 20, length=4)
  conditional = estimator.gains(cases.make_view(64, BUCKETS))[0]
  assert conditional.std() < 0.07


def test_coverage():
  """Item 20."""
  estimator = ChainEstimator()
  generator = np.random.default_rng(0)
  for step in range(300):
    drafted = np.where(generator.random(64) < 0.5, 4, 0)
    accepted = cases.draw_accepted(generator, 0.7, drafted)
    plan = policies.DraftPlan(lengths=np.full(64, 4))
    view = show(estimator, step, drafted, accepted, plan=plan)
  coverage = estimator.coverage(view)
  assert coverage == pytest.approx(0.5, abs=0.02)
  predicted = 64 + 64 * coverage * pooled(estimator)[:4].sum()
  realised = 64 + 32 * (0.7 ** np.arange(1, 5)).sum()
  assert predicted == pytest.approx(realised, rel=0.02)


@pytest.mark.parametrize('make', [ChainEstimator, TreeEstimator])
def test_lookups_that_find_nothing_for_long(make):
  """Coverage stays above 0, and the policy at work."""
  estimator, nothing = make(), np.zeros(1, int)
  asked = policies.DraftPlan(lengths=nothing + 4)
  found = {'plan': asked, 'accepted_ranks': np.full((1, 1), -1)}
  for step in range(4000):
    view = show(estimator, step, nothing, nothing, **found)
  assert 0 < estimator.coverage(view) < 0.02
  policy = Goodput(cases.LOOKUP_70B, estimator)
  for num_rows in (1, 16):
    view = cases.make_view(num_rows, BUCKETS, step=4000)
    assert np.isfinite(policy.plan_draft(view).lengths).all()


def test_steps_without_drafts_change_nothing():
  """Item 21: they are no observation, neither of 0 nor of one half."""
  estimator = ChainEstimator()
  feed(estimator, 0.8, 100)
  before, nothing = pooled(estimator), np.zeros(8, int)
  for step in range(100, 1000):
    show(estimator, step, nothing, nothing)
  show(estimator, 1000, nothing[:0], nothing[:0])  # no rows
  np.testing.assert_array_equal(pooled(estimator), before)
  # A long rest makes the next observation count more, and brings no prior back.
  feed(estimator, 0.0, 1, num_rows=8, length=1, first=1000)
  assert pooled(estimator)[0] < 0.4


def test_a_cold_start_is_defined():
  """Item 23."""
  estimator = ChainEstimator()
  np.testing.assert_allclose(pooled(estimator), 0.7 ** np.arange(1, 8))
  assert estimator.coverage(cases.make_view(1, BUCKETS)) == 1


def test_rows_that_are_no_evidence_are_left_out():
  """Item 25."""
  estimator, clean = ChainEstimator(), ChainEstimator()
  lengths, accepted = np.array([4, 4]), np.array([3, 0])
  usable = np.array([True, False])
  for step in range(50):
    show(estimator, step, lengths, accepted, is_usable=usable)
    show(clean, step, lengths * usable, accepted * usable)
  np.testing.assert_array_equal(pooled(estimator), pooled(clean))
  unknown = cases.make_view(2, BUCKETS)
  assert estimator.gains(unknown)[0, 1] == pooled(estimator)[0]


def test_nodes_of_a_tree():
  estimator = TreeEstimator()
  truth = TreeAcceptance(np.full(64, 400), np.full(64, 0.6), 15, seed=0)
  generator = np.random.default_rng(0)
  for step in range(300):
    emitted = np.full(64, step)
    view = cases.make_view(
      64, cases.TREE_BUCKETS, step=step, num_output=emitted
    )
    lengths = generator.choice([3, 7, 15], 64)
    accepted, ranks = truth.verify(view, lengths)
    estimator.observe(
      cases.make_outcome(view, lengths, accepted, accepted_ranks=ranks)
    )
  gains = estimator.gains(view)
  assert gains.shape == (15, 64)
  assert (np.diff(gains, axis=0) <= 0).all()
  _, expected = best_nodes(0.6, 15)
  np.testing.assert_allclose(gains[:, 0], expected, atol=0.03)
  assert gains[:, 0].sum() == pytest.approx(expected.sum(), rel=0.05)


def test_nodes_that_were_left_out_count():
  """Only confident nodes are verified; that does not make places better."""
  estimator = TreeEstimator()
  buckets = cases.unpadded(64, max_length=3)
  generator = np.random.default_rng(0)
  for step in range(300):
    confidences = -np.sort(-generator.uniform(0, 0.5, (3, 64)), axis=0)
    # Of three children of the root at most one is right.
    drawn = generator.random(64) - confidences.cumsum(axis=0)
    hit = (drawn > 0).sum(axis=0)
    lengths = (confidences > 0.25).sum(axis=0)
    ranks = np.where(hit < lengths, hit, -1)[None]
    drafts = policies.Drafts(
      lengths=np.full(64, 3), node_confidences=lambda c=confidences: c
    )
    found = {'drafts': drafts, 'accepted_ranks': ranks}
    view = show(estimator, step, lengths, ranks[0] >= 0, buckets, **found)
  gains = estimator.gains(view)[:, 0]
  np.testing.assert_allclose(gains, [3 / 8, 2 / 8, 1 / 8], atol=0.03)


@pytest.mark.parametrize(('threshold', 'power'), [(0.6, 1.0), (0.3, 0.5)])
def test_tokens_that_were_left_out_count(threshold, power):
  """Of tokens that are accepted with 0.6 only confident ones are verified.

  With a power of 0.5 the drafter is too sure of itself.
  """
  estimator = ChainEstimator()
  generator = np.random.default_rng(0)
  everything = np.full(64, 7)
  for step in range(250):
    truth = generator.beta(1.2, 0.8, (7, 64))
    is_lucky = generator.random((7, 64)) < truth
    drafts = policies.Drafts(lengths=everything, confidences=truth**power)
    # Now and then all is verified, or calibration would not be possible.
    is_wanted = (drafts.confidences >= threshold) | (step % 8 == 0)
    lengths = is_wanted.cumprod(axis=0).sum(axis=0)
    accepted = np.minimum(is_lucky.cumprod(axis=0).sum(axis=0), lengths)
    view = show(estimator, step, lengths, accepted, drafts=drafts)
  assert estimator.acceptance_rate == pytest.approx(0.6, rel=0.05)
  np.testing.assert_allclose(
    pooled(estimator)[:3], 0.6 ** np.arange(1, 4), atol=0.02
  )
  # No request is better than another.
  own = estimator.gains(view)[0]
  assert own.mean() == pytest.approx(0.6, rel=0.05)


def test_confidence_is_calibrated():
  """A drafter that is too sure of itself is found out."""
  calibration = Calibration()
  generator = np.random.default_rng(0)
  for step in range(200):
    confidences = generator.uniform(0, 1, (7, 64))
    is_lucky = generator.random((7, 64)) < confidences**2
    accepted = is_lucky.cumprod(axis=0).sum(axis=0)
    lengths = generator.integers(1, 8, 64)
    drafts = policies.Drafts(lengths=lengths, confidences=confidences)
    accepted = np.minimum(accepted, lengths)
    show(calibration, step, lengths, accepted, drafts=drafts)
  centres = np.arange(0.05, 1, 0.1)
  np.testing.assert_allclose(calibration(centres), centres**2, atol=0.06)
  assert Calibration()(centres) == pytest.approx(centres)


def test_nodes_are_calibrated():
  """In each halving of the confidence by the mean of its own square."""
  calibration = NodeCalibration()
  generator = np.random.default_rng(0)
  for step in range(300):
    confidences = -np.sort(-generator.uniform(0, 1, (7, 64)), axis=0)
    is_hit = generator.random((7, 64)) < confidences**2
    lengths = generator.integers(1, 8, 64)
    is_hit &= np.arange(7)[:, None] < lengths
    ranks = np.full((7, 64), -1)
    for row, hits in enumerate(is_hit.T):
      ranks[: hits.sum(), row] = np.flatnonzero(hits)
    drafts = policies.Drafts(
      lengths=lengths, node_confidences=lambda c=confidences: c
    )
    found = {'drafts': drafts, 'accepted_ranks': ranks}
    show(calibration, step, lengths, is_hit.sum(axis=0), **found)
  # The mean of x^2 over that of x, for x even in [1/2, 1].
  factor = (7 / 24) / (3 / 8)
  found = calibration(np.array([[0.8], [0.3], [0.1]]))[:, 0]
  expected = [0.8 * factor, 0.3 * factor / 2, 0.1 * factor / 4]
  np.testing.assert_allclose(found, expected, rtol=0.15)
  assert NodeCalibration()(confidences) == pytest.approx(confidences)


def test_no_node_gets_past_a_better_one():
  calibration = NodeCalibration()
  buckets = cases.unpadded(1, max_length=2)
  confidences = np.array([[0.6], [0.4]])
  drafts = policies.Drafts(
    lengths=np.array([2]), node_confidences=lambda: confidences
  )
  found = {'drafts': drafts, 'accepted_ranks': np.array([[1], [-1]])}
  for _ in range(100):
    show(calibration, 0, [2], [1], buckets, **found)
  better, worse = calibration(confidences)[:, 0]
  assert better == worse < 0.2


@pytest.mark.parametrize('make', [ChainEstimator, TreeEstimator])
def test_confidences_that_are_nan_count_as_none(make):
  buckets = cases.unpadded(2, max_length=3)
  view = cases.make_view(2, buckets)
  confidences = np.array([[np.nan, 0.9], [np.nan, 0.8], [np.nan, 0.7]])
  drafts = policies.Drafts(
    lengths=np.array([3, 3]),
    confidences=confidences if make is ChainEstimator else None,
    node_confidences=None if make is ChainEstimator else lambda: confidences,
  )
  estimator = make()
  ranks = np.array([[-1, 0], [-1, 1]])
  for _ in range(20):
    gains = estimator.gains_of(drafts)
    assert np.isfinite(gains).all()
    assert np.isfinite(estimator.gains(view)).all()
    assert allocation.allocate(gains, 3).tolist() == [0, 3]
    found = {'drafts': drafts, 'accepted_ranks': ranks}
    show(estimator, 0, [2, 2], [0, 2], buckets, **found)
