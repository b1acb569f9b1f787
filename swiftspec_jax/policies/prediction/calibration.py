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


class Calibration:
  """Acceptance by confidence, in bins of equal width."""

  def __init__(self):
    self._tried = np.zeros(_NUM_BINS)
    self._hits = np.zeros(_NUM_BINS)

  def __call__(self, confidences: np.ndarray) -> np.ndarray:
    """Returns the acceptance to expect, of the same shape."""
    confidences = np.nan_to_num(confidences)
    bins = _bins(confidences)
    prior = _WEIGHT * confidences
    return (self._hits[bins] + prior) / (self._tried[bins] + _WEIGHT)

  def observe(self, outcome: policies.Outcome) -> None:
    """Counts the tokens that were reached."""
    confidences = np.nan_to_num(outcome.drafts.confidences)
    places = np.arange(len(confidences))[:, None]
    is_hit = places < outcome.num_accepted
    is_reached = (places <= outcome.num_accepted) & (places < outcome.lengths)
    is_reached &= outcome.is_usable
    if not is_reached.any():
      return
    bins = _bins(confidences)
    tried = np.bincount(bins[is_reached], minlength=_NUM_BINS)
    hits = np.bincount(bins[is_reached & is_hit], minlength=_NUM_BINS)
    self._tried = self._tried * _DECAY + tried
    self._hits = self._hits * _DECAY + hits


class NodeCalibration:
  """Acceptance of the nodes of trees, by how confident the drafter is.

  Most nodes are unlikely, and for them a share counts, not a difference: bins
  are halvings of the confidence, and each has a factor on it. No factor lets a
  node get past a better one.
  """

  def __init__(self):
    self._expected = np.zeros(_NUM_HALVINGS)
    self._hits = np.zeros(_NUM_HALVINGS)

  def __call__(self, confidences: np.ndarray) -> np.ndarray:
    """Returns the acceptance to expect, not rising along K."""
    confidences = np.nan_to_num(confidences)
    factors = (self._hits + _NODE_WEIGHT) / (self._expected + _NODE_WEIGHT)
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
    bins = _halvings(confidences)
    expected = np.bincount(
      bins[is_tried], confidences[is_tried], minlength=_NUM_HALVINGS
    )
    hits = np.bincount(bins[is_tried & is_hit], minlength=_NUM_HALVINGS)
    self._expected = self._expected * _DECAY + expected
    self._hits = self._hits * _DECAY + hits


def _halvings(confidences: np.ndarray) -> np.ndarray:
  _, exponents = np.frexp(confidences)
  exponents = np.where(confidences > 0, exponents, -_NUM_HALVINGS)
  return np.clip(-exponents, 0, _NUM_HALVINGS - 1)


def _bins(confidences: np.ndarray) -> np.ndarray:
  return np.minimum((confidences * _NUM_BINS).astype(int), _NUM_BINS - 1)
