"""What a drafter's confidence is worth.

A draft model gives its token a probability; how often tokens of that
probability are accepted is another matter, and is counted here. NaN, which a
broken draft gives, counts as 0.

Legend: B rows, K longest draft.
"""

import numpy as np

from swiftspec_jax import policies

_NUM_BINS = 10
_WEIGHT = 8.0  # tokens for which the confidence itself is believed
_NUM_HALVINGS = 12
_NODE_WEIGHT = 4.0  # accepted nodes for which the same holds
_DECAY = 0.99  # weight of a step against the one after it


class _Bins:
  """What was accepted, and what that is compared with, in bins."""

  def __init__(self, num_bins: int):
    self._hits = np.zeros(num_bins)
    self._compared = np.zeros(num_bins)

  def _count(self, bins, compared, is_tried, is_hit) -> None:
    """Adds what was tried to bins, which fade; all are [K, B]."""
    size = len(self._hits)
    hits = np.bincount(bins[is_tried & is_hit], minlength=size)
    new = np.bincount(bins[is_tried], compared[is_tried], minlength=size)
    self._hits = self._hits * _DECAY + hits
    self._compared = self._compared * _DECAY + new


class Calibration(_Bins):
  """Acceptance by confidence, in bins of equal width."""

  def __init__(self):
    super().__init__(_NUM_BINS)

  def __call__(self, confidences: np.ndarray) -> np.ndarray:
    """Returns the acceptance to expect, of the same shape."""
    confidences = np.nan_to_num(confidences)
    bins = _bins(confidences)
    prior = _WEIGHT * confidences
    return (self._hits[bins] + prior) / (self._compared[bins] + _WEIGHT)

  def observe(self, outcome: policies.Outcome) -> None:
    """Counts the tokens that were reached."""
    confidences = np.nan_to_num(outcome.drafts.confidences)
    places = np.arange(len(confidences))[:, None]
    is_hit = places < outcome.num_accepted
    is_reached = (places <= outcome.num_accepted) & (places < outcome.lengths)
    is_reached &= outcome.is_usable
    if is_reached.any():
      ones = np.ones_like(confidences)
      self._count(_bins(confidences), ones, is_reached, is_hit)


class NodeCalibration(_Bins):
  """Acceptance of the nodes of trees, by how confident the drafter is.

  Most nodes are unlikely, and for them a share counts, not a difference: bins
  are halvings of the confidence, and each has a factor on it. No factor lets a
  node get past a better one.
  """

  def __init__(self):
    super().__init__(_NUM_HALVINGS)

  def __call__(self, confidences: np.ndarray) -> np.ndarray:
    """Returns the acceptance to expect, not rising along K."""
    confidences = np.nan_to_num(confidences)
    factors = (self._hits + _NODE_WEIGHT) / (self._compared + _NODE_WEIGHT)
    expected = confidences * factors[_halvings(confidences)]
    return np.minimum.accumulate(np.minimum(expected, 1.0), axis=0)

  def observe(self, outcome: policies.Outcome) -> None:
    """Counts the nodes that were verified."""
    confidences = np.nan_to_num(outcome.drafts.node_confidences())
    is_tried = np.arange(len(confidences))[:, None] < outcome.lengths
    is_tried &= outcome.is_usable
    if not is_tried.any():
      return
    is_hit = np.zeros_like(is_tried)
    levels, rows = np.nonzero(outcome.accepted_ranks >= 0)
    is_hit[outcome.accepted_ranks[levels, rows], rows] = True
    self._count(_halvings(confidences), confidences, is_tried, is_hit)


def _halvings(confidences: np.ndarray) -> np.ndarray:
  _, exponents = np.frexp(confidences)
  exponents = np.where(confidences > 0, exponents, -_NUM_HALVINGS)
  return np.clip(-exponents, 0, _NUM_HALVINGS - 1)


def _bins(confidences: np.ndarray) -> np.ndarray:
  return np.minimum((confidences * _NUM_BINS).astype(int), _NUM_BINS - 1)
