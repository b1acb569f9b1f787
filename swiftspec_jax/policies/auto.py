"""Goodput without a profile, for whatever drafts an engine has."""

from swiftspec_jax import policies
from swiftspec_jax.policies import cost_model
from swiftspec_jax.policies.best_source import BestSource
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.estimators import (
  ChainEstimator,
  TreeEstimator,
)
from swiftspec_jax.policies.prediction.live_costs import LiveCosts, LookupCosts
from swiftspec_jax.policies.prediction.lookup_estimator import LookupEstimator


def make(
  buckets: StepBuckets,
  *,
  is_tree: bool = False,
  drafts_by_model: bool = True,
  costs: cost_model.CostModel | None = None,
) -> policies.Policy:
  """Returns a new policy that chooses by predicted goodput.

  Args:
    buckets: the declared sizes.
    is_tree: whether drafts are trees.
    drafts_by_model: whether drafts take time, other than lookups.
    costs: seconds of a step, with drafts of the model; None learns them while
      it decodes, and those of steps with lookups alone.
  """
  estimator = ChainEstimator() if drafts_by_model else LookupEstimator()
  if is_tree:
    estimator = TreeEstimator()
  if costs is not None:
    return Goodput(costs, estimator)
  live = LiveCosts(buckets, drafts_by_model=drafts_by_model)
  policy = Goodput(live, estimator)
  if not drafts_by_model:
    return policy
  return BestSource(policy, Goodput(LookupCosts(live), LookupEstimator()))
