"""Choices of process 0, for an engine that several processes run together."""

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.runtime import hosts, sharding


class FromProcessZero(policies.Policy):
  """A policy that is asked, and learns, in process 0 alone.

  Hosts measure different times, and their floating point may differ, too. Two
  choices would mean programs in two orders, which wait for each other for ever.
  """

  def __init__(self, policy: policies.Policy):
    """Takes the policy, which must be the same in all processes."""
    self._policy = policy

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    values = hosts.from_process_zero(
      lambda: {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(self._policy.plan_draft(view)).items()
      }
    )
    arrays = {'lengths': np.array(values['lengths'], np.int64)}
    if values['is_probe'] is not None:
      arrays['is_probe'] = np.array(values['is_probe'], bool)
    return policies.DraftPlan(**{**values, **arrays})

  def plan_verify(self, view, plan, drafts) -> np.ndarray:
    lengths = hosts.from_process_zero(
      lambda: self._policy.plan_verify(view, plan, drafts).tolist()
    )
    return np.array(lengths, np.int64)

  def observe(self, outcome: policies.Outcome) -> None:
    if sharding.is_first_process():
      self._policy.observe(outcome)
