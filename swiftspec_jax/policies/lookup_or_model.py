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
# Steps after which a model that rests is asked again: it learns nothing
# meanwhile, and to ask it takes as long as all other work on a step's plan.
_ASK_EVERY = 8


class LookupOrModel(policies.Policy):
  """Asks two policies, and follows one of them.

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
    # What the model last promised; in which step, and for how many rows.
    self._promise, self._asked = np.inf, (0, 0)

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    by_lookup = self._by_lookup.plan_draft(_without_late(view))
    by_lookup = dataclasses.replace(by_lookup, uses_lookup=True)
    if np.isnan(by_lookup.expected_seconds):
      return by_lookup
    goodput = _goodput(by_lookup)
    if self._rests(view) and self._promise <= _HYSTERESIS * goodput:
      return by_lookup
    by_model = self._by_model.plan_draft(view)
    if np.isnan(by_model.expected_seconds):
      return by_model
    self._promise, self._asked = _goodput(by_model), (view.step, view.num_rows)
    if self._looked_up:
      self._looked_up = self._promise <= _HYSTERESIS * goodput
    else:
      self._looked_up = goodput > _HYSTERESIS * self._promise
    return by_lookup if self._looked_up else by_model

  def _rests(self, view: policies.StepView) -> bool:
    """Returns whether the model need not be asked."""
    step, num_rows = self._asked
    return (
      self._looked_up
      and view.step < step + _ASK_EVERY
      and view.num_rows == num_rows
      and not view.num_prefill_tokens
    )

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
