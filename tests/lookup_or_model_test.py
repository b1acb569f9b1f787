"""One policy over a draft model and lookups: as good as the better of them."""

import dataclasses

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax import policies
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.cost_model.without_draft import WithoutDraft
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.lookup_or_model import LookupOrModel
from swiftspec_jax.policies.prediction.live_costs import LiveCosts

BUCKETS = StepBuckets(
  rows=(1, 4, 16),
  query_tokens=(4, 16, 32, 64, 128),
  lengths=tuple(range(8)),
  draft_steps=(0,) + (1,) * 7,
)
# The draft takes as long as 30 tokens more, or as half a token.
COSTS = {
  'dear': cases.linear_costs(query_tokens=1e-4, rows=1e-4, steps=3e-3),
  'cheap': cases.linear_costs(query_tokens=1e-4, rows=1e-4, steps=5e-5),
}


def by_model(costs):
  return Goodput(costs or LiveCosts(BUCKETS, drafts_by_model=True))


def by_lookup(costs):
  if costs is None:
    return Goodput(LiveCosts(BUCKETS, drafts_by_model=False))
  return Goodput(WithoutDraft(costs))


class OnlyLookup(LookupOrModel):
  """What lookups alone reach in the same engine."""

  def plan_draft(self, view):
    plan = self._by_lookup.plan_draft(view)
    return dataclasses.replace(plan, uses_lookup=True)


def judged(generator, view, accepted, coverage):
  """What an engine tells of lookups that nobody asked."""
  is_found = generator.random(view.num_rows) < coverage
  lengths = np.minimum(view.limits, accepted + 1) * is_found
  outcome = cases.make_outcome(
    view,
    lengths,
    cases.draw_accepted(generator, 0.9, lengths),
    plan=policies.DraftPlan(lengths=view.limits, uses_lookup=True),
    seconds=float('nan'),
  )
  drafts = policies.Drafts(lengths=view.limits * is_found)
  return dataclasses.replace(outcome, drafts=drafts)


def tokens_per_second(policy, costs, num_rows, coverage, steps):
  """Lookups are right with probability 0.9, where they find something.

  Args:
    policy: that decides.
    costs: true ones.
    num_rows: rows of each step.
    coverage: share of the rows for which lookups find drafts.
    steps: range of their numbers.
  """
  generator = np.random.default_rng(0)
  num_tokens = seconds = 0.0
  for step in steps:
    view = cases.make_view(num_rows, BUCKETS, step=step)
    plan = policy.plan_draft(view)
    is_found = generator.random(num_rows) < (
      coverage if plan.uses_lookup else 1
    )
    drafts = policies.Drafts(lengths=plan.lengths * is_found)
    lengths = policy.plan_verify(view, plan, drafts)
    acceptance = 0.9 if plan.uses_lookup else 0.7
    accepted = cases.draw_accepted(generator, acceptance, lengths)
    longest = int(plan.lengths.max())
    drafting = 0 if plan.uses_lookup else BUCKETS.steps_of(longest)
    parts = costs.predict(
      BUCKETS.pad_rows(num_rows),
      BUCKETS.pad_query_tokens(num_rows + int(lengths.sum())),
      int(view.kv_lengths.sum()),
      drafting,
      finds_drafts=bool(lengths.any()),
    )
    took = float(parts.total)
    outcome = cases.make_outcome(
      view, lengths, accepted, plan=plan, seconds=took
    )
    policy.observe(dataclasses.replace(outcome, drafts=drafts))
    if isinstance(policy, LookupOrModel) and not plan.uses_lookup:
      policy.judge(judged(generator, view, accepted, coverage))
    num_tokens += num_rows + accepted.sum()
    seconds += took
  return num_tokens / seconds


@pytest.mark.parametrize(
  ('num_rows', 'drafts', 'coverage'),
  [
    (1, 'dear', 0.05),
    (1, 'cheap', 0.9),
    (12, 'dear', 0.9),
    (12, 'cheap', 0.05),
  ],
)
def test_it_is_as_good_as_the_better_source(num_rows, drafts, coverage):
  """With costs that are known, and with those that it learns."""
  costs = COSTS[drafts]

  def reached(policy):
    return tokens_per_second(policy, costs, num_rows, coverage, range(1000))

  single = max(
    reached(by_model(costs)),
    reached(OnlyLookup(by_model(costs), by_lookup(costs))),
  )
  for known in (costs, None):
    both = reached(LookupOrModel(by_model(known), by_lookup(known)))
    assert both > 0.96 * single


def test_a_change_of_the_text_is_noticed():
  """Lookups find nothing for long, then nearly everything."""
  costs = COSTS['dear']
  policy = LookupOrModel(by_model(costs), by_lookup(costs))
  tokens_per_second(policy, costs, 4, 0.0, range(1000))
  tokens_per_second(policy, costs, 4, 0.95, range(1000, 2500))
  reached = tokens_per_second(policy, costs, 4, 0.95, range(2500, 3000))
  alone = OnlyLookup(by_model(costs), by_lookup(costs))
  assert reached > 0.95 * tokens_per_second(alone, costs, 4, 0.95, range(500))
