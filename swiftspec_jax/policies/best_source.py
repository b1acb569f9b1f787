"""Drafts of a model, or of lookups alone: whichever has more goodput."""

import dataclasses

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies.goodput import Goodput

# Factor by which one source has to be better than the one that is followed.
_BETTER = 1.05
# The first steps have no drafts of the model: what plain ones take is learned
# before.
_NUM_WITHOUT_MODEL = 16
# Steps in which both are asked: early ones, and later one of some. Lookups may
# find more in any text, and a model that is not followed learns little.
_NUM_EARLY = 64
_ASK_LOOKUP_EVERY, _ASK_MODEL_EVERY = 2, 32
# Tokens that pay for what a model has to read before.
_PAYING_TOKENS = 64


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
    every = _ASK_MODEL_EVERY if self._was_lookup else _ASK_LOOKUP_EVERY
    asks_both = view.step < _NUM_EARLY or view.step % every == 0
    # Before the model reads a text it may be known that lookups are better.
    asks_both |= view.num_unread_tokens > 0 and not self._was_lookup
    if not view.can_look_up or not (self._was_lookup or asks_both):
      return self._model.plan_draft(view)
    found = self._lookup.plan_draft(view)
    if found.lengths.any():
      found = dataclasses.replace(found, is_lookup=True)
    if found.is_experiment or not asks_both or view.step < _NUM_WITHOUT_MODEL:
      return found
    drafted = self._model.plan_draft(view)
    # Who experiments expects to be followed.
    if drafted.is_experiment:
      return drafted
    if drafted.lengths.any():
      least = 1 / (
        1 / _goodput(drafted) + self._model.prefill_loss(view) / _PAYING_TOKENS
      )
      least *= 1 / _BETTER if self._was_lookup else _BETTER
      self._was_lookup = _goodput(found) > least
    else:
      self._was_lookup = True
    return found if self._was_lookup else drafted

  def plan_verify(self, view, plan, drafts) -> np.ndarray:
    source = self._lookup if plan.is_lookup else self._model
    return source.plan_verify(view, plan, drafts)

  def observe(self, outcome: policies.Outcome) -> None:
    own, other = self._model, self._lookup
    if not outcome.view.can_look_up:
      own.observe(outcome)
      return  # what lookups learned would be of no use
    if outcome.plan.is_lookup:
      own, other = other, own
    own.observe(outcome)
    other.observe_other(outcome)


def _goodput(plan: policies.DraftPlan) -> float:
  return plan.expected_tokens / plan.expected_seconds
