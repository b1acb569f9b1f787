"""What rounds with trees give and cost, and when the target waits for new ones.

A row loses its tree when the last verified token was not in it, or not
expanded. Either the target waits for the w draft forwards of a new one, or the
row sends its root alone and gets one token. A tree gives L, but a new one is w
levels deep only.

The rows of a batch emit E tokens together in a round of T seconds. A wait of t
seconds thus costs E t / T tokens, those that the same time yields otherwise.
For m rows without a tree it pays where

  m min(L - 1, w) > E t / T.

The device knows m first, with the verdict. The host sends it the least m that
is worth a wait, and need not have read a round of late. If no row has a tree
the target always waits, as in the SwiftSpec paper, whose batch is one row.
"""

import collections
import statistics

import numpy as np

from swiftspec_jax.config import TreeConfig

_DECAY = 0.95  # weight of a round against the one after it
# Rounds of a kind, at most and at least; a hiccup does not move their median.
_NUM_RECENT, _FEWEST = 15, 3
_LEAST_GAIN = 1e-3  # tokens of a tree, besides the root's


class RoundRates:
  """Follows the rounds of an engine.

  Attributes:
    num_tree_tokens: mean tokens of a row and round for which a tree was sent.
  """

  def __init__(self, tree: TreeConfig):
    """Begins with a guess: draft forwards fill the time of a verification."""
    self._waits = tree.waits_for_misses
    self.num_tree_tokens = 2.0
    # Mean tokens of a round, all rows, for each row that drafts; and the share
    # of rounds with a wait.
    self._num_tokens = 2.0
    self._share = 0.0
    # Of a wait: its forwards, and what one is thought to take of a round.
    self._wait_forwards = 1.0 + tree.num_restart_steps
    self._forward_cost = 1 / max(tree.num_draft_steps, 1)
    # Seconds of rounds without a wait, and with one.
    self._without = collections.deque[float](maxlen=_NUM_RECENT)
    self._waited = collections.deque[float](maxlen=_NUM_RECENT)

  @property
  def num_forwards(self) -> float:
    """Mean draft forwards of a round for which the target waits."""
    return self._share * self._wait_forwards

  def wait_from(self, num_rows: int) -> int:
    """Returns the least number of rows without a tree that is worth a wait.

    Args:
      num_rows: rows that draft.

    Returns:
      1 to `num_rows`, or 1 if that is 0; what the user has chosen, if so.
    """
    if self._waits is not None:
      return 1 if self._waits else max(num_rows, 1)
    gain = min(self.num_tree_tokens - 1, self._wait_forwards)
    gain = max(gain, _LEAST_GAIN)
    least = int(num_rows * self._num_tokens * self._wait_cost() / gain) + 1
    return max(min(least, num_rows), 1)

  def _wait_cost(self) -> float:
    """Returns t / T."""
    more = self._wait_forwards * self._forward_cost
    if min(len(self._without), len(self._waited)) >= _FEWEST:
      plain = statistics.median(self._without)
      more = max(statistics.median(self._waited) / plain - 1, 0.0)
    return more / (1 + self._share * more)

  def observe(
    self,
    num_sent: np.ndarray,
    num_tokens: np.ndarray,
    num_forwards: int,
    seconds: float | None,
  ) -> None:
    """Takes a round.

    Args:
      num_sent: i64[B] nodes that each row has sent, the root included; 0 for
        rows that do not draft.
      num_tokens: i64[B] tokens that the rows emit.
      num_forwards: draft forwards for which the target has waited.
      seconds: duration of the round; None if it did more than others do.
    """
    num_drafting = np.count_nonzero(num_sent)
    if not num_drafting:
      return
    of_rows = num_tokens.sum() / num_drafting
    self._num_tokens = _moved(self._num_tokens, of_rows)
    has_tree = num_sent > 1
    if has_tree.any():
      of_trees = num_tokens[has_tree].mean()
      self.num_tree_tokens = _moved(self.num_tree_tokens, of_trees)
    has_waited = num_forwards > 0
    self._share = _moved(self._share, has_waited)
    if has_waited:
      self._wait_forwards = _moved(self._wait_forwards, num_forwards)
    if seconds is not None:
      (self._waited if has_waited else self._without).append(seconds)


def _moved(mean: float, value: float) -> float:
  """Returns a mean that forgets, after one more value."""
  return mean + (1 - _DECAY) * (value - mean)
