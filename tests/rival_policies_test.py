"""The policies of others, by hand-computed values.

Numbers of items are those of the SmartSpec checklist of this project.
"""

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax import errors, policies
from swiftspec_jax.cli.flags import policy_names
from swiftspec_jax.policies import dsd
from swiftspec_jax.policies.adaptive_verification import (
  AdaptiveVerification,
  LogisticAcceptance,
)

# A step of n tokens takes 1 + n seconds.
BY_TOKENS = cases.linear_costs(fixed=1.0, query_tokens=1.0)


def stepped(policy, view, accepted, **drafts):
  """One step; rows accept `accepted` tokens at most; returns the lengths."""
  plan = policy.plan_draft(view)
  found = policies.Drafts(lengths=plan.lengths, **drafts)
  lengths = policy.plan_verify(view, plan, found)
  accepted = np.minimum(accepted, lengths)
  policy.observe(
    cases.make_outcome(view, lengths, accepted, plan=plan, drafts=found)
  )
  return lengths.tolist()


@pytest.mark.parametrize(
  ('acceptance', 'golden'),
  [
    (0.3, (2, 2, 1, 0, 0, 0, 0)),
    (0.5, (3, 3, 2, 1, 0, 0, 0)),
    (0.7, (5, 5, 4, 3, 2, 0, 0)),
    (0.9, (7, 7, 7, 6, 5, 0, 0)),
  ],
)
def test_early_stop_without_a_bonus(acceptance, golden):
  """Item 4: no second peak here, so the best length is found."""
  found = []
  for num_rows in (1, 4, 16, 64, 128, 256, 512):
    view = cases.make_view(num_rows, cases.unpadded(num_rows))
    found.append(dsd.search(view, cases.EAGLE_8B, acceptance))
  assert found == list(golden)


@pytest.mark.parametrize(('bonus', 'length'), [(1.0, 3), (1.1, 0)])
def test_early_stop_with_the_bonus(bonus, length):
  """Item 8: at 0.8 and 128 rows, where 3 would be 1.175 times better."""
  view = cases.make_view(128, cases.unpadded(128))
  found = dsd.search(view, cases.EAGLE_8B, 0.8, plain_bonus=bonus)
  assert found == length


def test_early_stop_knows_no_division_by_zero():
  """Item 1: goodput is 2(K + 1) over 1 + 2(K + 1), which always rises."""
  view = cases.make_view(2, cases.unpadded(2))
  assert dsd.search(view, BY_TOKENS, 1.0) == 7


def test_early_stop_at_the_memory_and_the_step():
  """Item 9: only 3 more tokens fit; and a step of 4 rows of 3."""
  view = cases.make_view(
    4, cases.unpadded(4), num_free_pages=0, num_spare_tokens=3
  )
  assert dsd.search(view, cases.EAGLE_8B, 0.95) == 3
  view = cases.make_view(4, cases.unpadded(4, max_query_tokens=12))
  assert dsd.search(view, cases.EAGLE_8B, 0.95) == 2


def test_dsd_averages_the_share_since_the_start():
  """2 of 3 that were judged, then 6 of 8; what lies after is not known."""
  policy = dsd.Dsd(cases.EAGLE_8B)
  view = cases.make_view(1, cases.unpadded(1))
  policy.observe(cases.make_outcome(view, [5], [2]))
  first = 0.85 * 0.7 + 0.15 * 2 / 3
  assert policy.acceptance_rate == pytest.approx(first)
  policy.observe(cases.make_outcome(view, [4], [4]))
  second = 0.85 * first + 0.15 * 6 / 7
  assert policy.acceptance_rate == pytest.approx(second)
  policy.observe(cases.make_outcome(view, [0], [0]))
  assert policy.acceptance_rate == pytest.approx(second)


def test_dsd_chooses_every_20_steps():
  policy = dsd.Dsd(cases.EAGLE_8B)
  one = cases.make_view(1, cases.unpadded(1), limits=[7])
  short = cases.make_view(1, cases.unpadded(1), limits=[2])
  assert [stepped(policy, one, 0) for _ in range(19)] == [[5]] * 19
  assert stepped(policy, short, 0) == [2]
  # By now the average is .7 times .85 to the 20th, and 5 / 5 of it is gone.
  assert stepped(policy, one, 0) == [0]


def test_dsd_pauses():
  """256 rows are not worth it: 100 steps without, for batches as large."""
  policy = dsd.Dsd(cases.EAGLE_8B)
  buckets = cases.unpadded(256)
  crowd = cases.make_view(256, buckets)
  asked = []

  def run(view, steps):
    for _ in range(steps):
      before = policy._num_asked
      assert not any(stepped(policy, view, 0))
      asked.append(policy._num_asked - before)

  run(crowd, 101)
  # The first step decides; the last one is the 100th of the pause, and asks.
  assert asked == [1] + [0] * 99 + [1]
  for num_rows in range(100, 82, -1):
    run(cases.make_view(num_rows, buckets), 1)
  # Smaller batches ask at once, but it is not the turn of another choice yet.
  assert asked[101:] == [1] * 18
  assert stepped(policy, cases.make_view(1, buckets), 0) == [5]


def solved(features, is_accepted, weights):
  """One full Newton step by the whole matrix: the slope, the intercepts."""
  places, _ = np.indices(features.shape)
  design = np.concatenate(
    [features[..., None], np.eye(len(features))[places]], axis=-1
  )[weights]
  expected = 1 / (1 + np.exp(-1.5))
  matrix = expected * (1 - expected) * design.T @ design
  score = design.T @ (is_accepted[weights] - expected)
  return np.linalg.solve(matrix + 1e-3 * np.eye(len(matrix)), score)


def test_logistic_acceptance_takes_newton_steps(monkeypatch):
  """Against the whole equations, where damping is as good as nothing."""
  generator = np.random.default_rng(0)
  model = LogisticAcceptance(3)
  features = generator.normal(size=(3, 4000))
  is_accepted = generator.random(features.shape) < 1 / (1 + np.exp(-features))
  accepted = is_accepted.cumprod(axis=0).sum(axis=0)
  lengths = generator.integers(0, 4, 4000)
  accepted = np.minimum(accepted, lengths)
  places = np.arange(3)[:, None]
  monkeypatch.setattr(
    'swiftspec_jax.policies.adaptive_verification._DAMPING', 0.0
  )
  for rows in np.split(np.arange(4000), 100):
    assert (model.num_refits, model.slope) == (0, 0)
    model.observe(features[:, rows], lengths[rows], accepted[rows])
  is_judged = (places <= accepted) & (places < lengths)
  expected = solved(features, places < accepted, is_judged)
  assert model.num_refits == 1
  assert model.slope == pytest.approx(expected[0])
  np.testing.assert_allclose(model.intercepts, 1.5 + expected[1:])


def test_logistic_acceptance_damps():
  """50 observations without features: half of score over information."""
  model = LogisticAcceptance(2)
  for step in range(100):
    lengths, accepted = np.array([2 * (step < 50)]), np.array([0])
    model.observe(np.zeros((2, 1)), lengths, accepted)
  rate = 1 / (1 + np.exp(-1.5))
  step = -50 * rate / (50 * rate * (1 - rate) + 1e-3)
  np.testing.assert_allclose(model.intercepts, [1.5 + step / 2, 1.5])
  assert model.slope == 0
  assert model(np.zeros((2, 1)))[1, 0] == pytest.approx(rate)


def test_logistic_acceptance_learns_calibrated_confidences():
  generator = np.random.default_rng(1)
  model = LogisticAcceptance(2)
  for _ in range(800):
    chances = generator.beta(2.0, 1.0, size=(2, 32))
    features = np.log(chances / (1 - chances))
    is_accepted = generator.random(chances.shape) < chances
    accepted = is_accepted.cumprod(axis=0).sum(axis=0)
    model.observe(features, np.full(32, 2), accepted)
  assert model.slope == pytest.approx(1, abs=0.1)
  np.testing.assert_allclose(model.intercepts, 0, atol=0.2)


def trained(costs, length):
  """A policy that has learned slope 1 and intercepts 0."""
  policy = AdaptiveVerification(costs, length)
  policy._make_room(cases.make_view(2, cases.unpadded(2, 3)))
  policy._acceptance.slope = 1.0
  policy._acceptance.intercepts = np.zeros(3)
  policy._acceptance.num_refits = 3
  return policy


def test_adaptive_verification_takes_the_best_tokens():
  """Item 13: how many is known from the drafts before, which from these.

  Gains are .9, .72, .6, .36, .36 and .216, and a step of n of them takes 7 + n
  seconds: 4.22 / 10 is more than 3.62 / 9 and 4.58 / 11. Drafts of a request
  without any before count 1: 6.62 / 12 is more than 5.9 / 11 and 6.98 / 13.
  """
  policy = trained(cases.linear_costs(fixed=5.0, query_tokens=1.0), 3)
  buckets = cases.unpadded(2, 3)
  view = cases.make_view(2, buckets)
  confidences = np.array([[0.9, 0.6], [0.8, 0.6], [0.5, 0.6]])
  assert stepped(policy, view, 0, confidences=confidences) == [3, 3]
  assert stepped(policy, view, 0, confidences=confidences) == [2, 1]
  swapped = confidences[:, ::-1]
  assert stepped(policy, view, 0, confidences=swapped) == [1, 2]
  new = cases.make_view(2, buckets, request_ids=[9, 1])
  assert sum(stepped(policy, new, 0, confidences=confidences)) == 5


def test_adaptive_verification_drafts_the_same_for_all():
  policy = AdaptiveVerification(cases.EAGLE_8B, 2)
  buckets = cases.unpadded(3, 3)
  for step in range(300):
    view = cases.make_view(3, buckets, step=step, limits=[3, 1, 0])
    assert stepped(policy, view, 0) == [2, 1, 0]
  assert policy._acceptance.num_refits == 3
  assert policy.plan_draft(view).lengths.tolist() == [2, 1, 0]


def test_adaptive_verification_learns_that_drafts_are_bad():
  policy = AdaptiveVerification(BY_TOKENS, 3)
  buckets = cases.unpadded(2, 3)
  view = cases.make_view(2, buckets)
  found = [stepped(policy, view, 0) for _ in range(400)]
  assert found[:300] == [[3, 3]] * 300
  assert found[300] == [0, 0] == found[-1]


def test_name_of_dsd():
  buckets = cases.unpadded(2)
  policy = policy_names.make('dsd', cases.EAGLE_8B, buckets, None)
  assert policy.plan_draft(cases.make_view(2, buckets)).is_first
  assert policy_names.needs_costs('dsd')
  with pytest.raises(errors.UserError, match='dsd is for chains'):
    policy_names.make('dsd', cases.EAGLE_8B, buckets, None, is_tree=True)


def test_name_of_adaptive_verification():
  buckets = cases.unpadded(2)
  make = policy_names.make
  policy = make('adaptive_verification_5', cases.EAGLE_8B, buckets, None)
  lengths = policy.plan_draft(cases.make_view(2, buckets)).lengths
  assert lengths.tolist() == [5, 5]
  with pytest.raises(errors.UserError, match='_9 is none of the declared'):
    make('adaptive_verification_9', cases.EAGLE_8B, buckets, None)
  with pytest.raises(errors.UserError, match='_5 is for chains'):
    make('adaptive_verification_5', cases.EAGLE_8B, buckets, None, is_tree=True)
