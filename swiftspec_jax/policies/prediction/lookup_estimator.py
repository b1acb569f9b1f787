"""What lookups are worth, learned from texts that nobody drafted for."""

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies.prediction.estimators import ChainEstimator

_DECAY = 0.98  # weight of a lookup in a request against the one after it
_ROW_WEIGHT = 8.0  # lookups for which a request trusts the others


class LookupEstimator(ChainEstimator):
  """Acceptance of lookups, and how many of them find something.

  Where outcomes say what lookups would have drafted, this counts and what was
  drafted does not: so neither a pause nor another source of drafts makes it
  forget. Texts differ mostly in how often a lookup finds something, which is
  counted for each request and shrunk to the others.
  """

  def __init__(self):
    super().__init__()
    self._asked = self._found = np.zeros(0)  # of the requests in the slots
    self._row_ids = np.zeros(0, np.int64)

  def coverage(self, view: policies.StepView) -> float:
    shared = super().coverage(view)
    if not self.is_told or not view.num_rows:
      return shared
    is_known = self._row_ids[view.slots] == view.request_ids
    asked = self._asked[view.slots] * is_known
    found = self._found[view.slots] * is_known
    shares = (found + _ROW_WEIGHT * shared) / (asked + _ROW_WEIGHT)
    return float(shares.mean())

  def observe(self, outcome: policies.Outcome) -> None:
    if outcome.looked_up is None and not self.is_told:
      super().observe(outcome)
    self.observe_other(outcome)

  def observe_other(self, outcome: policies.Outcome) -> None:
    """Counts lookups, those that found something, and their tokens."""
    view, told = outcome.view, outcome.looked_up
    if told is None:
      return
    self.is_told = True
    self._make_room(view)
    self._coverage.count(told.num_asked.sum(), told.num_found.sum())
    slots = view.slots
    kept = _DECAY**told.num_asked * (self._row_ids[slots] == view.request_ids)
    self._row_ids[slots] = view.request_ids
    self._asked[slots] = self._asked[slots] * kept + told.num_asked
    self._found[slots] = self._found[slots] * kept + told.num_found
    self._learn(
      view, told.num_reached.astype(float), told.num_right.astype(float)
    )

  def _make_room(self, view: policies.StepView) -> None:
    super()._make_room(view)
    if len(self._asked) != view.buckets.max_rows:
      self._asked = np.zeros(view.buckets.max_rows)
      self._found = np.zeros(view.buckets.max_rows)
      self._row_ids = np.full(view.buckets.max_rows, -1)
