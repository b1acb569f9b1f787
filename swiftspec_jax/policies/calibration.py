"""What a drafter's confidence is worth.

A draft model gives its token a probability; how often tokens of that
probability are accepted is another matter, and is counted here.

Legend: B rows, K longest draft.
"""

import numpy as np

from swiftspec_jax import policies

_NUM_BINS = 10
_WEIGHT = 8.0  # tokens for which the confidence itself is believed
_DECAY = 0.99  # weight of a step against the one after it


class Calibration:
  """Acceptance by confidence, in bins of equal width."""

  def __init__(self):
    self._tried = np.zeros(_NUM_BINS)
    self._hits = np.zeros(_NUM_BINS)

  def __call__(self, confidences: np.ndarray) -> np.ndarray:
    """Returns the acceptance to expect, of the same shape."""
    bins = _bins(confidences)
    prior = _WEIGHT * confidences
    return (self._hits[bins] + prior) / (self._tried[bins] + _WEIGHT)

  def observe(self, outcome: policies.Outcome) -> None:
    """Counts the tokens that were reached."""
    confidences = outcome.drafts.confidences
    places = np.arange(len(confidences))[:, None]
    is_hit = places < outcome.num_accepted
    is_reached = (places <= outcome.num_accepted) & (places < outcome.lengths)
    if outcome.is_usable is not None:
      is_reached &= outcome.is_usable
    if not is_reached.any():
      return
    bins = _bins(confidences)
    tried = np.bincount(bins[is_reached], minlength=_NUM_BINS)
    hits = np.bincount(bins[is_reached & is_hit], minlength=_NUM_BINS)
    self._tried = self._tried * _DECAY + tried
    self._hits = self._hits * _DECAY + hits


def _bins(confidences: np.ndarray) -> np.ndarray:
  return np.minimum((confidences * _NUM_BINS).astype(int), _NUM_BINS - 1)
