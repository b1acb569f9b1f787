"""How many nodes a round accepts, by how many of them are sent.

The last rounds tell about the text at hand, and are few. All rounds of the
decoder tell what texts are like. The estimate is what the last rounds say,
shrunk to what all say (empirical Bayes).
"""

from collections.abc import Sequence

import numpy as np

# Of the last rounds, and of all: weight of a round against the one after it.
_DECAYS = np.array([0.9, 0.99])[:, None, None]
_PAUSED = 0.5  # weight of the last rounds before a pause after it
_ALL_WEIGHT = 3.0  # rounds that what all say counts as
# Before the first round: of the first node, and of deeper ones.
_PRIOR_SHARES, _PRIOR_WEIGHT = (0.6, 0.95), 2.0


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
    self._tried = np.stack([np.zeros(shape), np.full(shape, _PRIOR_WEIGHT)])
    # Where no round reached, sizes that go there are worth a trial.
    first, deeper = _PRIOR_SHARES
    self._hits = deeper * self._tried
    self._hits[..., 0] = first * self._tried[..., 0]

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
    of_all = self._hits[1] / self._tried[1]
    shares = self._hits[0] + _ALL_WEIGHT * of_all
    shares /= self._tried[0] + _ALL_WEIGHT
    is_possible = np.arange(shares.shape[1]) < self._buckets[:, None] - 1
    survivals = np.cumprod(shares, axis=1) * is_possible
    # With more nodes, at least as many are accepted.
    return np.maximum.accumulate(survivals, axis=0)
