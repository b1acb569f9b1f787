"""The goodput policy over many steps: probes, hysteresis, speed."""

import sys

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax import errors, policies
from swiftspec_jax.policies import goodput, loading
from swiftspec_jax.policies.batch_table import BatchTable
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.estimators import ChainEstimator

COSTS = cases.EAGLE_8B.monotone()


class OneArgument(FixedLength):
  """What users write: a class that takes costs."""

  def __init__(self, costs):
    super().__init__()
    self.costs = costs


class TwoArguments(FixedLength):
  def __init__(self, first, second):
    del first, second
    super().__init__()


@pytest.mark.parametrize('num_rows', [1, 64])
def test_good_drafts_are_noticed_while_off(num_rows):
  """Item 21: by probes that are verified, and that cost less than 1 %."""
  policy = Goodput(COSTS)

  def run(acceptance, steps):
    found = cases.play(policy, cases.unpadded(num_rows), acceptance, steps)
    plans, lengths = zip(*found, strict=True)
    probes = np.array([plan.is_probe is not None for plan in plans])
    return np.mean(lengths, axis=1), probes

  run(0.0, range(300))
  lengths, probes = run(0.0, range(300, 1600))
  assert 0.005 < probes.mean() < 0.01
  assert not lengths[~probes].any()
  assert (lengths[probes] > 0).all()
  lengths, probes = run(0.9, range(1600, 3400))
  assert (lengths[-500:] > 3).all()
  assert np.flatnonzero(lengths > 3)[0] < 10 * 128


def test_probes_take_turns(monkeypatch):
  monkeypatch.setattr(goodput, '_PROBE_EVERY', 4)
  policy = Goodput(COSTS, cases.Oracle(0.0))
  probed = []
  buckets = cases.unpadded(64)
  for step in range(200):
    view = cases.make_view(64, buckets, step=step, max_draft_tokens=4)
    plan = policy.plan_draft(view)
    if plan.is_probe is not None:
      probed.append(np.flatnonzero(plan.lengths))
  assert {len(rows) for rows in probed} == {4}
  assert len(np.unique(np.concatenate(probed))) == 64


def test_a_row_is_probed_while_others_draft():
  """At the latest after two probes, and in less than 1 % of its steps."""
  rates = np.where(np.arange(64) == 5, 0.01, 0.8)
  policy = Goodput(COSTS, cases.Oracle(rates))
  played = cases.play(policy, cases.unpadded(64), rates, range(1300))
  verified = np.array([lengths for _, lengths in played])
  assert (verified[:, 0] > 0).all()
  steps = np.flatnonzero(verified[:, 5])
  assert np.diff(steps, prepend=0, append=1300).max() <= 2 * 128
  assert len(steps) <= 13


def test_a_row_that_got_better_is_noticed_while_others_draft():
  """Within four probes, however bad its drafts had been."""
  policy = Goodput(COSTS)
  generator = np.random.default_rng(0)
  buckets = cases.unpadded(64)
  rates = np.full(64, 0.8)
  rates[5] = 0.0
  wrong = np.full(64, 7)
  for step in range(300):
    # As at a low load, where long drafts cost nothing.
    view = cases.make_view(64, buckets, step=step)
    accepted = cases.draw_accepted(generator, rates, wrong)
    policy.observe(cases.make_outcome(view, wrong, accepted))
  parts = []
  for rates[5], steps in ((0.0, range(300, 700)), (0.9, range(700, 1400))):
    played = cases.play(policy, buckets, rates, steps)
    parts.append(np.array([lengths for _, lengths in played]))
  bad, good = parts
  assert (bad[:, 5] > 0).mean() < 0.05
  # Probes are in steps 812, 940, 1068 and 1196.
  assert good[500:, 5].mean() > 0.8 * good[500:].mean()
  assert (good[:, 6] > 0).all()


def test_drafts_that_are_never_worth_verifying_are_probed():
  """Lookups cost nothing, so every row has a draft; none is confident."""
  policy = Goodput(cases.linear_costs(query_tokens=0.01))
  nothing, ones = np.zeros(4, int), np.ones(4, int)
  buckets = cases.unpadded(4, 2)
  steps = []
  asked = policies.DraftPlan(lengths=ones)
  # Once nothing was found; since then all rows are asked in every step.
  view = cases.make_view(4, buckets)
  policy.observe(cases.make_outcome(view, nothing, nothing, plan=asked))
  for step in range(600):
    view = cases.make_view(4, buckets, step=step)
    plan = policy.plan_draft(view)
    drafts = policies.Drafts(lengths=ones, confidences=np.full((2, 4), 0.01))
    lengths = policy.plan_verify(view, plan, drafts)
    policy.observe(
      cases.make_outcome(view, lengths, nothing, plan=asked, drafts=drafts)
    )
    steps += [step] * bool(lengths.all())
  assert steps == [128, 256, 384, 512]


def test_rows_that_must_not_be_drafted_for_are_not_probed(monkeypatch):
  monkeypatch.setattr(goodput, '_PROBE_EVERY', 1)
  policy = Goodput(COSTS, cases.Oracle(0.0))
  buckets = cases.unpadded(4)
  limits = np.array([0, 0, 5, 0])

  def planned(step, limits):
    view = cases.make_view(4, buckets, limits=limits, step=step)
    return policy.plan_draft(view)

  # It may have taken over from another policy just now.
  assert planned(9, limits).is_probe is None
  assert planned(10, limits).lengths.tolist() == [0, 0, 1, 0]
  assert planned(18, limits * 0).is_probe is None


def test_a_probe_that_finds_nothing_stays_due(monkeypatch):
  monkeypatch.setattr(goodput, '_PROBE_EVERY', 32)
  policy = Goodput(COSTS, cases.Oracle(0.0))
  steps = []
  for step in range(100):
    view = cases.make_view(
      1, cases.unpadded(1), step=step, finds_drafts_late=True
    )
    plan = policy.plan_draft(view)
    found = plan.lengths * (step >= 40)
    policy.observe(cases.make_outcome(view, found, 0 * found, plan=plan))
    steps += [step] * (plan.is_probe is not None)
  assert steps == [*range(32, 41), 72]


def switches():
  """How often the length changes at a boundary between two lengths."""
  played = cases.play(Goodput(COSTS), cases.unpadded(2), 0.7, range(1200))
  longest = [plan.lengths.max() for plan, _ in played]
  return np.count_nonzero(np.diff(longest[200:]))


def test_hysteresis(monkeypatch):
  """Items 22 and 46."""
  monkeypatch.setattr(goodput, '_PLAN_EVERY', 1)
  assert switches() < 5
  monkeypatch.setattr(goodput, '_HYSTERESIS', 1.0)
  assert switches() > 30


def test_another_batch_size_may_switch_at_once(monkeypatch):
  """Item 22."""
  monkeypatch.setattr(goodput, '_HYSTERESIS', 10.0)
  policy = Goodput(COSTS, cases.Oracle(0.7))
  views = [cases.make_view(n, cases.unpadded(n)) for n in (1, 1, 64, 64, 1)]
  found = [policy.plan_draft(view).lengths.max() for view in views]
  assert found[0] == found[1] == found[4] > found[2] == found[3]


def test_the_first_decision():
  """Item 23."""
  view = cases.make_view(1, cases.unpadded(1))
  assert Goodput(COSTS).plan_draft(view).lengths[0] >= 4


@pytest.mark.parametrize(
  ('estimator', 'least', 'most'),
  [(cases.NaiveRatio(), 0.75, 0.76), (ChainEstimator(), 0.98, 1)],
)
def test_a_biased_estimator_locks_at_zero(monkeypatch, estimator, least, most):
  """Item 46: acceptance .7, 64 rows, after a first step of 7 tokens each."""
  generator = np.random.default_rng(0)
  buckets = cases.unpadded(64)
  monkeypatch.setattr(goodput, '_PROBE_EVERY', 10**9)
  policy = Goodput(cases.EAGLE_8B, estimator)
  lengths = np.full(64, 7)
  for step in range(30):
    view = cases.make_view(64, buckets, step=step)
    accepted = cases.draw_accepted(generator, 0.7, lengths)
    policy.observe(cases.make_outcome(view, lengths, accepted))
    lengths = policy.plan_draft(view).lengths
  values = cases.curve(cases.EAGLE_8B, 0.7, 64, 512)
  reached = values[round(lengths.mean())] / max(values)
  assert least <= reached <= most
  assert lengths.any() == (least > 0.9)


@pytest.mark.parametrize('num_rows', [8, 256])
def test_decisions_loop_over_no_requests(num_rows):
  """Item 24: 100 us on a machine at rest, counted in calls of functions."""
  buckets = StepBuckets.powers_of_two(num_rows, 2048, 7)
  policy = Goodput(COSTS)
  generator = np.random.default_rng(0)
  rates = generator.uniform(0.3, 0.95, num_rows)
  list(cases.play(policy, buckets, rates, range(50)))
  view, calls = cases.make_view(num_rows, buckets, step=50), []
  sys.setprofile(lambda _, event, __: calls.append(event))
  try:
    policy.plan_draft(view)
  finally:
    sys.setprofile(None)
  assert calls.count('call') + calls.count('c_call') < 200


def test_fixed_length_and_none():
  buckets = cases.unpadded(3)
  view = cases.make_view(3, buckets, limits=[7, 2, 0])
  assert FixedLength(5).plan_draft(view).lengths.tolist() == [5, 2, 0]
  view = cases.make_view(3, buckets, num_prefill_tokens=20, max_draft_tokens=1)
  for drafts_first, lengths in ((False, [1, 0, 0]), (True, [5, 5, 5])):
    policy = FixedLength(5, drafts_first=drafts_first)
    _, plan = policies.ask(policy, view)
    assert plan.lengths.tolist() == lengths
  assert FixedLength().plan_draft(view).lengths.tolist() == [0, 0, 0]
  with pytest.raises(errors.UserError, match='length must be at least 0'):
    FixedLength(-1)


def test_batch_table():
  """The golden lengths of a profile at acceptance .7 and context 512."""
  buckets = StepBuckets(
    rows=(1, 4, 16, 64, 128, 256, 512),
    query_tokens=tuple(range(1, 4097)),
    lengths=tuple(range(8)),
  )
  table = BatchTable.profile(cases.EAGLE_8B, buckets, [0.7] * 7, 512)
  assert table.lengths == {1: 5, 4: 5, 16: 4, 64: 3, 128: 2, 256: 0, 512: 0}
  for num_rows, length in ((1, 5), (2, 5), (5, 4), (65, 2), (200, 0)):
    view = cases.make_view(num_rows, cases.unpadded(num_rows))
    lengths = table.plan_draft(view).lengths
    assert lengths.tolist() == [length] * num_rows
  with pytest.raises(errors.UserError, match='the table needs lengths'):
    BatchTable({})


def test_a_policy_of_ones_own():
  policy = loading.load('goodput_control_test:OneArgument', COSTS)
  assert policy.costs is COSTS
  view = cases.make_view(2, cases.unpadded(2))
  assert policy.plan_draft(view).lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('goodput', "does not name a policy; give 'module:Class'"),
    ('no_such_module:Policy', 'cannot import no_such_module'),
    ('goodput_control_test:Missing', 'has no class Missing'),
    ('serving_cases:Oracle', 'it must be a subclass of policies.Policy'),
    ('goodput_control_test:TwoArguments', 'cannot be made from a cost model'),
  ],
)
def test_what_is_no_policy_is_refused(name, message):
  with pytest.raises(errors.UserError, match=message):
    loading.load(name, COSTS)


def test_missing_drafts_leave_room_for_others():
  """Item 32: lengths are chosen again when it is known who has a draft."""
  policy = Goodput(COSTS, cases.Oracle(0.7))
  view = cases.make_view(64, cases.unpadded(64))
  plan = policies.DraftPlan(lengths=np.full(64, 7))
  drafted = np.where(np.arange(64) < 8, 7, 0)
  found = policy.plan_verify(view, plan, policies.Drafts(lengths=drafted))
  everyone = policies.Drafts(lengths=plan.lengths - (np.arange(64) == 0))
  crowded = policy.plan_verify(view, plan, everyone)
  assert not found[8:].any()
  assert found[:8].min() > crowded.max()
  nothing = policies.Drafts(lengths=np.zeros(64, int))
  assert not policy.plan_verify(view, plan, nothing).any()
