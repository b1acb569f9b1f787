"""What will be accepted, learned from what was.

A draft ends at its first rejection, so what comes after was never tried, and a
draft that was accepted as a whole tells nothing about what would have come
next. The share of accepted among drafted tokens ignores both and is too low.
Here every position counts only the drafts that reached it: the product-limit
estimate of survival under censoring (Kaplan and Meier, 1958).

Legend: B rows, K longest draft.
"""

from typing import Protocol

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies.prediction.calibration import (
  Calibration,
  NodeCalibration,
)

_DECAY = 0.99  # weight of a step against the one after it
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 10.0  # tokens
# Of a tree each round tells about all places at once.
_TREE_PRIOR_WEIGHT = 5.0  # rounds
# Forgetting lowers the weight of what is known, not its value, and never below
# this: otherwise a long rest would bring back the prior.
_LEAST_WEIGHT = 4.0  # tokens
_POSITION_WEIGHT = 8.0  # tokens for which a position trusts the common rate
_ROW_WEIGHT = 4.0  # rejections for which a request trusts the others


class Estimator(Protocol):
  """Predicts the gain of every draft token.

  Attributes:
    is_told: whether it learns from steps without its drafts, too.
  """

  is_told: bool = False

  def coverage(self, view: policies.StepView) -> float:
    """Returns the share of the rows that will have a draft, above 0."""

  def gains(self, view: policies.StepView) -> np.ndarray:
    """Returns f64[K, B], not rising along K.

    The probability that the draft token is accepted, all before it included, if
    the row has a draft that long.
    """

  def gains_of(self, drafts: policies.Drafts) -> np.ndarray | None:
    """Returns the gains f64[K, B] that the drafter itself expects, if any."""

  def observe(self, outcome: policies.Outcome) -> None:
    """Takes the outcome of a step."""

  def observe_other(self, outcome: policies.Outcome) -> None:
    """Takes the outcome of a step with drafts of another source."""


class Coverage:
  """How many of the rows that are asked for a draft have one.

  One row that had a draft is never forgotten: the share stays above 0, however
  long none has one.
  """

  def __init__(self):
    self._asked = self._drafted = 0.0

  @property
  def share(self) -> float:
    """Recent share, 1 before anything is known."""
    return (1 + self._drafted) / (1 + self._asked)

  def observe(self, outcome: policies.Outcome) -> None:
    """Counts the rows of a step."""
    self.count(
      np.count_nonzero(outcome.plan.lengths),
      np.count_nonzero(outcome.drafts.lengths),
    )

  def count(self, asked: int, drafted: int) -> None:
    """Counts rows that were asked for a draft, and those that had one."""
    if asked:
      self._asked = self._asked * _DECAY + asked
      self._drafted = self._drafted * _DECAY + drafted


class ChainEstimator(Estimator):
  """Acceptance of a chain: per position, and per request shrunk to the others.

  The conditional acceptance of a position is shrunk to the rate of all
  positions, which so also stands for positions that are not drafted at present.
  A request differs from the others by one factor on its rejections: those that
  it had over those that were to be expected, shrunk to 1.

  Where the drafter is confident to different degrees, mostly tokens that it
  believes in are verified, and those are better than others. So tokens that
  were drafted and left out count as well, with what was to be expected of them.
  """

  def __init__(self):
    self._coverage = Coverage()
    self._calibration = Calibration()
    self._last_step = 0
    self._rate_hits = _PRIOR_RATE * _PRIOR_WEIGHT
    self._rate_stops = (1 - _PRIOR_RATE) * _PRIOR_WEIGHT
    # f64[K], made when K is known.
    self._hits = self._reached = np.zeros(0)
    # Of the requests in the slots.
    self._request_ids = self._request_steps = np.zeros(0, np.int64)
    self._stops = self._expected_stops = np.zeros(0)

  def coverage(self, view: policies.StepView) -> float:
    del view
    return self._coverage.share

  @property
  def acceptance_rate(self) -> float:
    """Accepted over tried tokens, all positions and requests together."""
    return self._rate_hits / (self._rate_hits + self._rate_stops)

  def conditional_acceptance(self) -> np.ndarray:
    """Returns f64[K]: acceptance of a position that is reached."""
    prior = _POSITION_WEIGHT * self.acceptance_rate
    return (self._hits + prior) / (self._reached + _POSITION_WEIGHT)

  def gains(self, view: policies.StepView) -> np.ndarray:
    self._make_room(view)
    slots = view.slots
    stops = self._stops[slots] + _ROW_WEIGHT
    stops /= self._expected_stops[slots] + _ROW_WEIGHT
    is_known = self._request_ids[slots] == view.request_ids
    factors = np.where(is_known, stops, 1.0)
    gains = np.multiply.outer(self.conditional_acceptance() - 1, factors)
    gains += 1
    np.maximum(gains, 0, out=gains)
    for position in range(1, len(gains)):
      gains[position] *= gains[position - 1]
    return gains

  def gains_of(self, drafts: policies.Drafts) -> np.ndarray | None:
    if drafts.confidences is None:
      return None
    return self._calibration(drafts.confidences).cumprod(axis=0)

  def observe(self, outcome: policies.Outcome) -> None:
    self._make_room(outcome.view)
    self._coverage.observe(outcome)
    if not outcome.drafts.lengths.any():
      return
    if outcome.drafts.confidences is not None:
      self._calibration.observe(outcome)
    self._learn(outcome.view, *self._evidence(outcome))

  def _learn(
    self, view: policies.StepView, reached: np.ndarray, hits: np.ndarray
  ) -> None:
    """Counts tokens that were reached, and accepted, both f64[K, B]."""
    if not reached.any():
      return
    stops = reached - hits
    elapsed = max(view.step - self._last_step, 1)
    self._last_step = view.step
    decay = _DECAY**elapsed
    weight = self._rate_hits + self._rate_stops
    kept = max(decay, min(_LEAST_WEIGHT / weight, 1.0))
    self._rate_hits = self._rate_hits * kept + hits.sum()
    self._rate_stops = self._rate_stops * kept + stops.sum()
    # Before this step's outcome is part of them.
    expected_stops = (1 - self.conditional_acceptance()) @ reached
    self._hits = self._hits * decay + hits.sum(axis=1)
    self._reached = self._reached * decay + reached.sum(axis=1)
    self._observe_rows(view, reached, hits, expected_stops)

  def _evidence(
    self, outcome: policies.Outcome
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns how likely tokens were reached, and accepted, both f64[K, B]."""
    places = np.arange(len(self._hits))[:, None]
    chances = (places < outcome.num_accepted).astype(float)
    known = outcome.lengths
    if outcome.drafts.confidences is not None:
      expected = self._calibration(outcome.drafts.confidences)
      chances = np.where(places < outcome.lengths, chances, expected)
      known = outcome.drafts.lengths
    known = known * outcome.is_usable
    hits = chances.cumprod(axis=0)
    reached = np.ones_like(hits)
    reached[1:] = hits[:-1]
    is_known = places < known
    return reached * is_known, hits * is_known

  def _observe_rows(self, view, reached, hits, expected_stops) -> None:
    rows = np.flatnonzero(reached.any(axis=0))
    slots, request_ids = view.slots[rows], view.request_ids[rows]
    stops = (reached - hits).sum(axis=0)
    # After a pause a success makes what was known before old: the request may
    # have changed. A failure only confirms it.
    paused = np.maximum(view.step - self._request_steps[slots] - 1, 0)
    success = np.minimum(hits.max(axis=0)[rows], 1)
    kept = _DECAY ** (1 + paused * success)
    kept[self._request_ids[slots] != request_ids] = 0
    self._request_ids[slots] = request_ids
    self._request_steps[slots] = view.step
    self._stops[slots] = self._stops[slots] * kept + stops[rows]
    self._expected_stops[slots] *= kept
    self._expected_stops[slots] += expected_stops[rows]

  def _make_room(self, view: policies.StepView) -> None:
    if len(self._hits) == view.buckets.max_length:
      return
    self._hits = np.zeros(view.buckets.max_length)
    self._reached = np.zeros(view.buckets.max_length)
    num_slots = view.buckets.max_rows
    self._request_ids = np.full(num_slots, -1)
    self._request_steps = np.zeros(num_slots, np.int64)
    self._stops = np.zeros(num_slots)
    self._expected_stops = np.zeros(num_slots)


class TreeEstimator(Estimator):
  """Acceptance of a tree: for each place in the proposal, best node first.

  A verdict tells of every node that was verified whether it is on the accepted
  path, so nothing is censored. Nodes that were drafted and then left out were
  the ones that the draft believed in least: they count with what it expected of
  them, or places would look better than they are. Places without drafts keep
  the gain that they have, but never above that of a better place.
  """

  def __init__(self):
    self._coverage = Coverage()
    self._calibration = NodeCalibration()
    self._hits = self._tried = np.zeros(0)

  def coverage(self, view: policies.StepView) -> float:
    del view
    return self._coverage.share

  def gains(self, view: policies.StepView) -> np.ndarray:
    self._make_room(view)
    by_place = np.minimum.accumulate(self._hits / self._tried)
    return np.repeat(by_place[:, None], view.num_rows, axis=1)

  def gains_of(self, drafts: policies.Drafts) -> np.ndarray | None:
    if drafts.node_confidences is None:
      return None
    return self._calibration(drafts.node_confidences())

  def observe(self, outcome: policies.Outcome) -> None:
    self._make_room(outcome.view)
    self._coverage.observe(outcome)
    is_counted = outcome.lengths > 0
    is_counted &= outcome.is_usable
    if not is_counted.any():
      return
    size = len(self._hits)
    tried = _at_least(outcome.lengths[is_counted], size)
    ranks = outcome.accepted_ranks[:, is_counted]
    hits = np.bincount(ranks[ranks >= 0], minlength=size)
    if outcome.drafts.node_confidences is not None:
      self._calibration.observe(outcome)
      places = np.arange(size)[:, None]
      is_left_out = places < outcome.drafts.lengths
      is_left_out &= places >= outcome.lengths
      tried = tried + is_left_out.sum(axis=1)
      expected = self.gains_of(outcome.drafts)
      hits = hits + expected.sum(axis=1, where=is_left_out)
    kept = np.where(
      tried > 0, np.maximum(_DECAY, np.minimum(1, 1 / self._tried)), 1.0
    )
    self._hits = self._hits * kept + hits
    self._tried = self._tried * kept + tried

  def _make_room(self, view: policies.StepView) -> None:
    """Starts from trees whose every level is accepted at the prior's rate."""
    lengths = view.buckets.lengths
    if len(self._hits) == lengths[-1]:
      return
    sizes = np.diff(lengths)
    levels = _PRIOR_RATE ** np.arange(1, len(lengths))
    self._tried = np.full(lengths[-1], _TREE_PRIOR_WEIGHT)
    self._hits = np.repeat(levels / sizes, sizes) * _TREE_PRIOR_WEIGHT


def _at_least(numbers: np.ndarray, size: int) -> np.ndarray:
  """Returns how many of the numbers are at least 1, 2, ... `size`."""
  counts = np.bincount(numbers, minlength=size + 1)
  return counts[::-1].cumsum()[::-1][1:]
