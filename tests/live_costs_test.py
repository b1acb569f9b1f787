"""Costs that are learned from the steps: as good as those that are known."""

import collections

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax import policies
from swiftspec_jax.policies import auto
from swiftspec_jax.policies.best_source import BestSource
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.live_costs import LiveCosts

BUCKETS = StepBuckets(
  rows=(1, 4, 16), query_tokens=(4, 16, 32, 64, 128), lengths=tuple(range(8))
)
CHEAP = cases.linear_costs(query_tokens=1e-5, rows=1e-4, steps=3e-4)
DEAR = cases.linear_costs(query_tokens=1e-3, rows=1e-4, steps=2e-3)


def seconds_of(costs, view, plan, lengths):
  """True seconds of a step, padded."""
  buckets = view.buckets
  longest = int(plan.lengths.max())
  fed = min(view.num_rows + int(lengths.sum()) + view.num_prefill_tokens, 128)
  parts = costs.predict(
    buckets.pad_rows(view.num_rows),
    buckets.pad_query_tokens(fed),
    int(view.kv_lengths.sum()),
    buckets.steps_of(longest),
    finds_drafts=bool(lengths.any()),
  )
  return float(parts.total)


def tokens_per_second(
  policy, costs, num_rows, acceptance, steps, hiccups=False
):
  """What a policy reaches in steps i of a range."""
  generator = np.random.default_rng(0)
  num_tokens = seconds = 0.0
  for step in steps:
    view = cases.make_view(num_rows, BUCKETS, step=step)
    plan = policy.plan_draft(view)
    drafts = policies.Drafts(lengths=plan.lengths)
    lengths = policy.plan_verify(view, plan, drafts)
    accepted = cases.draw_accepted(generator, acceptance, lengths)
    took = seconds_of(costs, view, plan, lengths)
    noise = generator.normal(1, 0.03)
    if hiccups and generator.random() < 0.01:
      noise *= 10
    outcome = cases.make_outcome(
      view, lengths, accepted, plan=plan, seconds=took * noise
    )
    policy.observe(outcome)
    num_tokens += num_rows + accepted.sum()
    seconds += took
  return num_tokens / seconds


@pytest.mark.parametrize(
  ('num_rows', 'acceptance', 'costs'),
  [(1, 0.8, CHEAP), (3, 0.1, DEAR), (16, 0.8, DEAR), (16, 0.1, CHEAP)],
  ids=['one', 'bad_and_dear', 'dear', 'bad'],
)
def test_learned_costs_are_as_good_as_known_ones(num_rows, acceptance, costs):
  """Hiccups of steps are no part of what is reached."""

  def reached(own, hiccups):
    return tokens_per_second(
      Goodput(own), costs, num_rows, acceptance, range(500), hiccups
    )

  known = reached(costs, hiccups=False)
  learned = reached(LiveCosts(BUCKETS, drafts_by_model=True), hiccups=True)
  assert learned > 0.95 * known


def test_what_does_not_count_is_no_try():
  """The first steps read a prompt, and then the draft reads it."""
  costs = LiveCosts(BUCKETS, drafts_by_model=True)
  assert costs.due(cases.make_view(0, BUCKETS, step=0)) is None
  late = cases.make_view(1, BUCKETS, step=1, num_unread_tokens=50)
  assert costs.due(late) is None
  dues = [costs.due(cases.make_view(1, BUCKETS, step=i)) for i in range(2, 10)]
  assert dues == [5, 5, None, None, None, 0, 0, None]  # plain steps second


def test_costs_that_change_are_noticed():
  """What was dear, and so not done, has become cheap."""
  policy = Goodput(LiveCosts(BUCKETS, drafts_by_model=True))
  tokens_per_second(policy, DEAR, 4, 0.6, range(500))
  tokens_per_second(policy, CHEAP, 4, 0.6, range(500, 2000))
  reached = tokens_per_second(policy, CHEAP, 4, 0.6, range(2000, 2500))
  known = tokens_per_second(Goodput(CHEAP), CHEAP, 4, 0.6, range(500))
  assert reached > 0.95 * known


@pytest.mark.parametrize(
  ('accepted', 'share_found', 'step_seconds', 'best'),
  [
    ((0.8, 0.3), 0.3, 2e-3, 'model'),
    ((0.8, 0.6), 0.5, 4e-2, 'lookup'),
    ((0.3, 0.0), 0.5, 4e-2, 'none'),
  ],
  ids=lambda x: x if isinstance(x, str) else '',
)
def test_the_best_source_is_followed(accepted, share_found, step_seconds, best):
  """Trees of a model, lookups that often find nothing, or plain steps."""
  generator = np.random.default_rng(0)
  costs = cases.linear_costs(fixed=0.01, query_tokens=4e-4, steps=step_seconds)
  buckets = StepBuckets(
    rows=(1,),
    query_tokens=(1, 4, 8, 32),
    lengths=tuple(range(8)),
    draft_steps=(0,) + (1,) * 7,
  )
  policy = auto.make(buckets)
  counts = collections.Counter()
  for step in range(1500):
    view = cases.make_view(
      1,
      buckets,
      step=step,
      num_output=step,
      can_look_up=True,
      finds_drafts_late=True,
    )
    plan = policy.plan_draft(view)
    lengths, source = plan.lengths, 'lookup' if plan.is_lookup else 'model'
    if plan.is_lookup and generator.random() > share_found:
      lengths = np.zeros(1, np.int64)
    num_tokens = buckets.computed_tokens(1, 1 + int(lengths.sum()))
    num_steps = int(source == 'model' and plan.lengths.any())
    took = costs.predict(1, num_tokens, 512, num_steps)
    num_accepted = cases.draw_accepted(
      generator, accepted[plan.is_lookup], lengths
    )
    outcome = cases.make_outcome(
      view,
      lengths,
      num_accepted,
      plan=plan,
      drafts=policies.Drafts(lengths=lengths),
      seconds=float(took.total) * generator.normal(1, 0.03),
    )
    policy.observe(outcome)
    counts[source if plan.lengths.any() else 'none'] += 1
  assert counts[best] > 0.9 * counts.total()


def test_a_probe_of_the_model_leaves_the_source_as_it_is():
  buckets = cases.unpadded(1)
  model = Goodput(cases.linear_costs(fixed=10, query_tokens=0.2, steps=1))
  lookup = Goodput(cases.linear_costs(fixed=10, query_tokens=0.2))
  policy = BestSource(model, lookup)
  for step in range(200):
    view = cases.make_view(
      1, buckets, step=step, num_output=step, can_look_up=True
    )
    plan = policy.plan_draft(view)
    # The model would be better than nothing.
    assert plan.is_lookup or (plan.is_probe is not None and step == 160)
    accepted = np.minimum(plan.lengths, 2)
    policy.observe(cases.make_outcome(view, plan.lengths, accepted, plan=plan))


def test_what_was_never_seen_is_free():
  costs = LiveCosts(BUCKETS, drafts_by_model=True)

  def predict(rows, tokens, steps, **more):
    return float(costs.predict(rows, tokens, 0, steps, **more).total)

  def note(num_rows, length, seconds, step=0):
    view = cases.make_view(num_rows, BUCKETS, step=step)
    lengths = np.full(num_rows, length)
    outcome = cases.make_outcome(view, lengths, lengths, seconds=seconds)
    costs.observe(outcome)

  assert predict(1, 4, 0) == predict(16, 128, 7)  # nothing is known
  note(4, 0, 0.2)
  assert predict(4, 4, 0) == pytest.approx(0.2, rel=1e-3)
  assert predict(16, 128, 7) == pytest.approx(0.2, rel=0.01)
  note(4, 0, 0.2)
  note(4, 3, 4.0)  # a hiccup, which alone does not count
  assert predict(4, 16, 3) == pytest.approx(0.2, rel=0.01)
  note(4, 3, 4.0)
  for _ in range(3):
    note(4, 3, 0.4)
  assert predict(4, 16, 3) == pytest.approx(0.4, rel=0.01)
  assert predict(4, 16, 7) > predict(4, 16, 3)
  note(4, 3, 4.0)  # a hiccup
  assert predict(4, 16, 3) == pytest.approx(0.4, rel=0.01)
  # Long ago it was dear; now it is seen to be cheap for fewer.
  for _ in range(3):
    note(4, 1, 0.2, step=9999)
  assert predict(4, 16, 3) < 0.25


def test_a_step_whose_lookup_finds_nothing_is_a_plain_one():
  costs = LiveCosts(BUCKETS, drafts_by_model=False)
  view = cases.make_view(1, BUCKETS)
  for seconds in (0.1, 0.2, 0.3, 0.4, 0.5):
    plan = policies.DraftPlan(lengths=np.array([3]))
    nothing = np.zeros(1, np.int64)
    outcome = cases.make_outcome(
      view, nothing, nothing, plan=plan, seconds=seconds
    )
    costs.observe(outcome)
  plain = costs.predict(1, 1, 0, 0).total
  assert plain == costs.predict(1, 1, 0, 1, finds_drafts=False).total
  assert plain == pytest.approx(0.3, rel=0.05)


def test_steps_in_which_the_draft_reads_do_not_count():
  """Also where it is not done, so that there is no draft yet."""
  costs = LiveCosts(BUCKETS, drafts_by_model=True)
  view, nothing = cases.make_view(1, BUCKETS), np.zeros(1, np.int64)
  for seconds, reads in ((0.1, False), (0.1, False), (9.0, True), (9.0, True)):
    outcome = cases.make_outcome(
      view, nothing, nothing, seconds=seconds, prefills_draft=reads
    )
    costs.observe(outcome)
  assert costs.predict(1, 1, 0, 0).total == pytest.approx(0.1, rel=1e-3)


def test_lookups_are_free():
  for drafts_by_model in (False, True):
    costs = LiveCosts(BUCKETS, drafts_by_model=drafts_by_model)
    parts = costs.predict(1, 4, 0, np.array([0, 1]))
    assert (parts.draft > 0).tolist() == [False, drafts_by_model]
