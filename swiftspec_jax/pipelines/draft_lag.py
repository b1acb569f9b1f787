"""How many tokens a draft lacks that does not follow every verdict."""

import collections
from collections.abc import Sequence


class DraftLag:
  """A bound that the host keeps, though it reads rounds late.

  A round counts with the most tokens that it can emit until it has been read.

  Attributes:
    bound: most tokens that a row of the draft lacks, the root included; 0 if
      it follows every verdict.
  """

  def __init__(self):
    self.bound = 0
    self._period = 0  # since the draft has caught up
    # Of rounds that have not been read: the period, and how they count.
    self._unread = collections.deque()

  def note_followed(self) -> None:
    """Notes a round that the draft follows."""
    self._unread.append((self._period, 0))

  def note_missed(self, most_tokens: int) -> None:
    """Notes a round that the draft does not follow."""
    self.bound += most_tokens
    self._unread.append((self._period, most_tokens))

  def note_caught_up(self, bound: int = 0) -> None:
    """Notes that the draft lacks `bound` tokens at most."""
    self.bound = bound
    self._period += 1

  def read(self, num_tokens: Sequence[int]) -> None:
    """Takes how many tokens rows emitted in the oldest unread round."""
    period, most_tokens = self._unread.popleft()
    if period == self._period and most_tokens and num_tokens:
      self.bound -= most_tokens - max(num_tokens)
