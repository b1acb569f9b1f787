"""What ended requests wrote, to look continuations up in.

The texts are few enough to be searched one token after the other, so that a
new one costs nothing.

Legend: n tokens of all texts, marks included.
"""

import collections
from collections.abc import Iterator, Sequence

import numpy as np

from swiftspec_jax.drafters.texts import continuations

_END = -1  # after a text


class PastTexts:
  """The latest texts; the oldest ones go as a whole."""

  def __init__(self, num_tokens: int):
    """Starts empty.

    Args:
      num_tokens: most tokens of all texts together.
    """
    self._num_tokens = num_tokens
    self._texts: collections.deque[np.ndarray] = collections.deque()
    self._tokens = np.zeros(0, np.int32)  # i32[n]

  def add(self, token_ids: np.ndarray) -> None:
    """Adds a text i32[any]."""
    self._texts.append(np.append(token_ids, np.int32(_END)))
    count = sum(map(len, self._texts)) - len(self._texts)
    while count > self._num_tokens:
      count -= len(self._texts.popleft()) - 1
    self._tokens = np.concatenate([np.zeros(0, np.int32), *self._texts])

  def continuations(
    self, match: Sequence[int], length: int, most: int
  ) -> Iterator[list[int]]:
    """Yields what followed some tokens, in no text beyond its end.

    Args:
      match: token ids, at least one.
      length: most tokens of a continuation; there is at least one.
      most: number of places to look at, the latest.
    """
    *_, places = continuations.places_after(self._tokens, match)
    places = places[self._tokens[places] != _END]
    for place in places[-most:].tolist():
      found = self._tokens[place : place + length].tolist()
      if _END in found:
        found = found[: found.index(_END)]
      yield found
