"""Batches, costs and flawed rules for the tests of policies and scheduler."""

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies.cost_model import profiles
from swiftspec_jax.policies.cost_model.linear import (
  DraftCoefficients,
  LinearCosts,
  TargetCoefficients,
)
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.prediction.estimators import (
  ChainEstimator,
  Estimator,
)

PLENTY = 10**6  # pages
TREE_BUCKETS = StepBuckets(
  rows=tuple(range(1, 65)),
  query_tokens=tuple(range(1, 1025)),
  lengths=(0, 3, 7, 15),
  draft_steps=(0, 1, 2, 3),
)


def unpadded(num_rows, max_length=7, max_query_tokens=None):
  """Buckets that pad nothing."""
  most = max_query_tokens or num_rows * (max_length + 1)
  return StepBuckets(
    rows=tuple(range(1, num_rows + 1)),
    query_tokens=tuple(range(1, most + 1)),
    lengths=tuple(range(max_length + 1)),
  )


def make_view(num_rows, buckets, **fields):
  """Of rows that are alike; a field of rows may be one number of them all."""
  rows = np.arange(num_rows)
  of_rows = {
    'request_ids': rows,
    'slots': rows,
    'kv_lengths': 512,
    'limits': buckets.max_length,
    'num_verified': 0,
    'num_accepted': 0,
    'num_spare_tokens': 0,
    'num_output': 1,
  }
  values = {
    'step': 0,
    'num_prefill_tokens': 0,
    'prefill_kv_tokens': 0,
    'max_draft_tokens': buckets.max_query_tokens - num_rows,
    'page_size': 16,
    'num_free_pages': PLENTY,
    'num_waiting': 0,
    **fields,
  }
  for name, default in of_rows.items():
    value = values.get(name, default)
    values[name] = np.array(np.broadcast_to(value, num_rows))
  return policies.StepView(**values, buckets=buckets)


def make_outcome(view, lengths, num_accepted, *, drafted=None, **fields):
  """What happened in a step that drafted what it was asked for."""
  lengths = np.asarray(lengths)
  drafted = lengths if drafted is None else np.asarray(drafted)
  return policies.Outcome(
    view=view,
    plan=fields.pop('plan', policies.DraftPlan(lengths=drafted)),
    drafts=fields.pop('drafts', policies.Drafts(lengths=drafted)),
    lengths=lengths,
    num_accepted=np.asarray(num_accepted),
    seconds=fields.pop('seconds', 0.01),
    **fields,
  )


def draw_accepted(generator, acceptance, lengths):
  """Geometric numbers of accepted tokens, independent for the rows."""
  if np.all(np.asarray(acceptance) == 0):
    return np.zeros_like(lengths)
  stops = 1 - np.broadcast_to(acceptance, lengths.shape)
  return np.minimum(generator.geometric(stops) - 1, lengths)


def play(policy, buckets, acceptance, steps):
  """Steps of full batches; yields the plans and what was verified."""
  generator = np.random.default_rng(0)
  for step in steps:
    view = make_view(buckets.rows[-1], buckets, step=step)
    plan = policy.plan_draft(view)
    drafts = policies.Drafts(lengths=plan.lengths)
    lengths = policy.plan_verify(view, plan, drafts)
    accepted = draw_accepted(generator, acceptance, lengths)
    policy.observe(make_outcome(view, lengths, accepted, plan=plan))
    yield plan, lengths


class Oracle(Estimator):
  """Knows the acceptance of every row."""

  def __init__(self, acceptance, coverage=1.0):
    self.acceptance = np.asarray(acceptance)
    self._share = coverage

  def coverage(self, view):
    return self._share

  def gains(self, view):
    positions = np.arange(1, view.buckets.max_length + 1)[:, None]
    rates = self.acceptance
    if rates.ndim:
      rates = rates[view.request_ids]
    return np.broadcast_to(
      rates**positions, (len(positions), view.num_rows)
    ).copy()

  def gains_of(self, drafts):
    return None

  def observe(self, outcome):
    pass


class NaiveRatio(Oracle):
  """Accepted over drafted tokens, as in the authors' branch req-dsd."""

  def __init__(self, acceptance=0.7):
    super().__init__(acceptance)

  def observe(self, outcome):
    if outcome.lengths.sum():
      ratio = outcome.num_accepted.sum() / outcome.lengths.sum()
      self.acceptance = np.asarray(ratio)


class Average(Oracle):
  """Accepted over drafted tokens since the start, as in the branch dsd."""

  def __init__(self):
    super().__init__(0.7)
    self.num_accepted = self.num_verified = 0

  def observe(self, outcome):
    self.num_accepted += outcome.num_accepted.sum()
    self.num_verified += outcome.lengths.sum()
    self.acceptance = np.asarray(self.num_accepted / self.num_verified)


class PooledEstimator(ChainEstimator):
  """Takes all requests for equal."""

  def observe(self, outcome):
    super().observe(outcome)
    self._request_ids[:] = -1


def geometric_tokens(acceptance, length, num_rows, num_drafting):
  """Expected tokens of a step in closed form, as in the paper."""
  if acceptance == 1:
    chain = length + 1
  else:
    chain = (1 - acceptance ** (length + 1)) / (1 - acceptance)
  return num_drafting * chain + num_rows - num_drafting


def curve(costs, acceptance, num_rows, kv_length, max_length=7):
  """Goodput when all rows have the same length, for each length."""
  return [
    geometric_tokens(acceptance, k, num_rows, num_rows)
    / costs.predict(num_rows, num_rows * (k + 1), num_rows * kv_length, k).total
    for k in range(max_length + 1)
  ]


EAGLE_8B = profiles.get('llama-8b-h100')
LOOKUP_70B = profiles.get('llama-70b-h100')


def linear_costs(*, fixed=0.01, query_tokens=0.0, rows=0.0, kv=0.0, steps=0.0):
  """Costs of few coefficients."""
  return LinearCosts(
    target=TargetCoefficients(
      kv=kv,
      query_tokens=query_tokens,
      rows=rows,
      speculative=0.0,
      fixed=fixed,
    ),
    draft=DraftCoefficients(steps=steps),
  )
