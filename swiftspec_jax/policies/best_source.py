"""Drafts of a model, or of lookups alone: whichever has more goodput."""

import dataclasses

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies.goodput import Goodput

# Factors by which the model has to be better than lookups: to be followed, and
# to stay so. It has to read what it has missed, and what is known of lookups
# is old by then.
_BETTER, _STILL_BETTER = 1.2, 1.05
# Steps in which both are asked: the first ones, and later one of some. To ask
# costs the host time, and who is not followed learns little.
_NUM_FIRST = 64
_ASK_BOTH_EVERY = 8
# Tokens of a text for which only lookups are asked: whether it repeats earlier
# text shows early, and a model that is not needed reads no prompt.
_NUM_LOOKED_UP = 16


class BestSource(policies.Policy):
  """Asks the goodput of each source, and follows the higher one.

  A tree of a model has lookups in it, but costs forwards. Where these are dear,
  lookups alone may still pay.
  """

  def __init__(self, model: Goodput, lookup: Goodput):
    """Takes the policies for the drafts of both, which know nothing yet."""
    self._model = model
    self._lookup = lookup
    self._was_lookup = False

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    plan = self._best(view)
    if plan.lengths.any() and not plan.is_experiment:
      self._was_lookup = plan.is_lookup
    return plan

  def _best(self, view: policies.StepView) -> policies.DraftPlan:
    asks_both = view.step < _NUM_FIRST or view.step % _ASK_BOTH_EVERY == 0
    is_new = bool((view.num_output < _NUM_LOOKED_UP).all())
    is_asked = asks_both or self._was_lookup or is_new
    if not view.can_look_up or not is_asked:
      return self._model.plan_draft(view)
    # Who is asked expects to be followed in its experiments.
    found = self._lookup.plan_draft(
      dataclasses.replace(view, num_unread_tokens=0)
    )
    if found.lengths.any():
      found = dataclasses.replace(found, is_lookup=True)
    if found.is_experiment or not asks_both or is_new:
      return found
    drafted = self._model.plan_draft(view)
    if drafted.is_experiment or not found.lengths.any():
      return drafted
    least = _goodput(drafted)
    if drafted.lengths.any():
      least /= _BETTER if self._was_lookup else _STILL_BETTER
    return found if _goodput(found) > least else drafted

  def plan_verify(self, view, plan, drafts) -> np.ndarray:
    return self._source(plan).plan_verify(view, plan, drafts)

  def observe(self, outcome: policies.Outcome) -> None:
    own = self._source(outcome.plan)
    own.observe(outcome)
    if not outcome.view.can_look_up:
      return  # what lookups learned would be of no use
    other = self._model if own is self._lookup else self._lookup
    if outcome.plan.lengths.any():
      other.observe_other(outcome)
    else:
      other.observe(outcome)

  def _source(self, plan: policies.DraftPlan) -> Goodput:
    return self._lookup if plan.is_lookup else self._model


def _goodput(plan: policies.DraftPlan) -> float:
  return plan.expected_tokens / plan.expected_seconds
