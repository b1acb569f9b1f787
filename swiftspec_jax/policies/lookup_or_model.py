"""Goodput over two sources of drafts: a draft model, and the texts themselves.

A lookup takes no time and finds drafts now and then; a model takes time and
always has some. Which of them pays depends on text and load. So each has a
policy with costs and acceptance of its own, and each step goes to the one that
promises more tokens a second.

Legend: B rows.
"""

import dataclasses

import numpy as np

from swiftspec_jax import policies

_HYSTERESIS = 1.02  # gain that is worth a change of the source


class LookupOrModel(policies.Policy):
  """Asks two policies in each step, and follows one of them.

  A plan that promises nothing is an experiment of its policy, and is followed.
  """

  wants_lookup_feedback = True

  def __init__(self, by_model: policies.Policy, by_lookup: policies.Policy):
    """Keeps two policies that predict the goodput of their plans.

    Args:
      by_model: policy for drafts of the model.
      by_lookup: policy for drafts that are looked up.
    """
    self._by_model = by_model
    self._by_lookup = by_lookup
    self._looked_up = False  # in the last step

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    by_model = self._by_model.plan_draft(view)
    # Asked last: its experiments must not be lost to those of the other.
    if np.isnan(by_model.expected_seconds):
      return by_model
    by_lookup = self._by_lookup.plan_draft(_without_late(view))
    by_lookup = dataclasses.replace(by_lookup, uses_lookup=True)
    if np.isnan(by_lookup.expected_seconds):
      return by_lookup
    same, other = by_model, by_lookup
    if self._looked_up:
      same, other = other, same
    is_better = _goodput(other) > _HYSTERESIS * _goodput(same)
    chosen = other if is_better else same
    self._looked_up = chosen.uses_lookup
    return chosen

  def plan_verify(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    drafts: policies.Drafts,
  ) -> np.ndarray:
    policy = self._by_lookup if plan.uses_lookup else self._by_model
    return policy.plan_verify(view, plan, drafts)

  def observe(self, outcome: policies.Outcome) -> None:
    is_plain = not outcome.plan.lengths.any()
    if is_plain or not outcome.plan.uses_lookup:
      self._by_model.observe(outcome)
    if is_plain or outcome.plan.uses_lookup:
      self.judge(outcome)

  def judge(self, outcome: policies.Outcome) -> None:
    view = _without_late(outcome.view)
    self._by_lookup.observe(dataclasses.replace(outcome, view=view))


def _goodput(plan: policies.DraftPlan) -> float:
  return plan.expected_tokens / plan.expected_seconds


def _without_late(view: policies.StepView) -> policies.StepView:
  """Returns the view of a lookup, which reads no text before it drafts."""
  if not view.num_unread_tokens:
    return view
  return dataclasses.replace(view, num_unread_tokens=0)
