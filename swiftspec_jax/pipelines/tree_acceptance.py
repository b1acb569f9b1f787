"""How many nodes a round accepts, by how many of them are sent.

The last rounds tell about the text at hand, and are few. All rounds of the
decoder tell what texts are like, and all depths what a depth is like that was
hardly reached. Each estimate is shrunk to the next broader one (empirical
Bayes), so that a new decoder soon stops sending trees that do not pay.
"""

from collections.abc import Sequence

import numpy as np

# Of the last rounds, and of all: weight of a round against the one after it.
_DECAYS = np.array([0.9, 0.99])[:, None, None]
_PAUSED = 0.5  # weight of the last rounds before a pause after it
# Before the first round: of the first node, and of deeper ones.
_PRIOR_SHARES = (0.5, 0.8)
_WEIGHT = 3.0  # rounds that a broader estimate counts as


class TreeAcceptance:
  """Learns how many nodes the first nodes of a proposal accept."""

  def __init__(self, buckets: Sequence[int]):
    """Starts as if few rounds had been seen.

    Args:
      buckets: numbers of nodes to learn about (N), in ascending order. The root
        counts.
    """
    self._buckets = np.array(buckets)
    # [:, i, k]: rounds that accepted k of the first `buckets[i]` nodes, and
    # those among them that accepted another node.
    shape = (len(buckets), max(buckets[-1] - 1, 1))
    self._tried = np.zeros((2, *shape))
    self._hits = np.zeros_like(self._tried)

  @property
  def is_new(self) -> bool:
    """Whether no round was observed."""
    return not self._tried[0].any()

  def end_pause(self) -> None:
    """Notes that the text went on for some time without trees."""
    self._tried[0] *= _PAUSED
    self._hits[0] *= _PAUSED

  def observe(
    self, num_nodes: int, paths: Sequence[Sequence[int]], depths: Sequence[int]
  ) -> None:
    """Takes what a round accepted, for it and for fewer nodes.

    Args:
      num_nodes: nodes that each row sent.
      paths: accepted nodes of each row, the root first.
      depths: most nodes behind the root that each row could have accepted.
    """
    self._tried *= _DECAYS
    self._hits *= _DECAYS
    for i, bucket in enumerate(self._buckets):
      if not 1 < bucket <= num_nodes:
        continue
      for path, depth in zip(paths, depths, strict=True):
        num_accepted = sum(node < bucket for node in path[1:])
        num_tried = min(num_accepted + 1, depth, bucket - 1)
        self._tried[:, i, :num_tried] += 1 / len(paths)
        self._hits[:, i, : min(num_accepted, num_tried)] += 1 / len(paths)

  def survivals(self) -> np.ndarray:
    """Returns f64[N, K]: probability to accept more than 0, 1, ... nodes."""
    shares = self._shares()
    shares *= np.arange(shares.shape[1]) < self._buckets[:, None] - 1
    survivals, reached = np.empty_like(shares), np.ones(len(shares))
    for depth, rates in enumerate(shares.T):
      # With more nodes, at least as many are accepted.
      reached = np.maximum.accumulate(reached * rates)
      survivals[:, depth] = reached
    return survivals

  def _shares(self) -> np.ndarray:
    """Returns f64[N, K]: probability to accept one more, behind k nodes."""
    (hits, of_all_hits), (tried, of_all_tried) = self._hits, self._tried
    first, deeper = _PRIOR_SHARES
    shares = np.full_like(hits, first)
    shares[:, 1:] = _shrunk(
      of_all_hits[:, 1:].sum(axis=1), of_all_tried[:, 1:].sum(axis=1), deeper
    )[:, None]
    shares = _shrunk(of_all_hits, of_all_tried, shares)
    return _shrunk(hits, tried, shares)


def _shrunk(hits, tried, broader):
  """Returns shares of hits, shrunk to a broader estimate."""
  return (hits + _WEIGHT * broader) / (tried + _WEIGHT)
