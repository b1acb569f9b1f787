"""Phrases that the target predicted, by the token in front of them.

After a rejected token, too, the target says what it would write there. Such
predictions are often right a little later, so they are kept (Ouroboros, arXiv
2402.13720).

Legend: n tokens of a draft, G tokens of a phrase.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence

Phrase = tuple[int, ...]


class PhrasePool:
  """The latest phrases after each token."""

  def __init__(self, size: int, length: int):
    """Starts empty.

    Args:
      size: number of phrases that a token keeps.
      length: G, tokens of each phrase.
    """
    self._size = size
    self._length = length
    self._phrases: dict[int, collections.deque[Phrase]] = {}

  def add(self, token_id: int, phrase: Phrase) -> None:
    """Makes a phrase the newest one after a token; the oldest falls out."""
    phrases = self._phrases.setdefault(
      token_id, collections.deque(maxlen=self._size)
    )
    if phrase in phrases:
      phrases.remove(phrase)
    phrases.append(phrase)

  def add_text(self, token_ids: Sequence[int]) -> None:
    """Adds all phrases of a text, the last one as the newest."""
    for start in range(len(token_ids) - self._length):
      end = start + 1 + self._length
      self.add(token_ids[start], tuple(token_ids[start + 1 : end]))

  def remove(self, token_id: int, phrase: Phrase) -> None:
    """Takes a phrase out; does nothing if it is not there any more."""
    phrases = self._phrases.get(token_id, ())
    if phrase in phrases:
      phrases.remove(phrase)

  def newest(self, token_id: int, most: int) -> list[Phrase]:
    """Returns up to `most` phrases after a token, the newest first."""
    phrases = self._phrases.get(token_id, ())
    return list(itertools.islice(reversed(phrases), most))


def mine(
  token_ids: Sequence[int],
  parents: Sequence[int],
  choices: Sequence[int],
  length: int,
  first: int = 0,
) -> Iterator[tuple[int, Phrase]]:
  """Yields what the target would write after the nodes of a draft.

  A phrase goes on as long as a node has the token that the target chose.

  Args:
    token_ids: token of each of n nodes.
    parents: index of the node above, which comes earlier; -1 for the root.
    choices: choice of the target after the root and after each node.
    length: G, tokens of a phrase; shorter ones are left out.
    first: index of the first node to look after.

  Yields:
    The token of a node, and the phrase after it.
  """
  below = _children(token_ids, parents)
  for start in range(first, len(token_ids)):
    phrase, node = [choices[start + 1]], start
    while len(phrase) < length and (node, phrase[-1]) in below:
      node = below[node, phrase[-1]]
      phrase.append(choices[node + 1])
    if len(phrase) == length:
      yield token_ids[start], tuple(phrase)


def corrected(
  phrase: Phrase,
  token_ids: Sequence[int],
  parents: Sequence[int],
  choices: Sequence[int],
  end: int,
) -> Phrase | None:
  """Returns what the target predicted along a phrase, None if not all of it.

  Args:
    phrase: phrase that was drafted.
    token_ids: same as in `mine`.
    parents: same as in `mine`.
    choices: same as in `mine`.
    end: index of the node that the phrase stands after; -1 for the root.
  """
  below = _children(token_ids, parents)
  node, found = end, []
  for token_id in phrase:
    found.append(choices[node + 1])
    if (node, token_id) not in below:
      return None
    node = below[node, token_id]
  return tuple(found)


def _children(
  token_ids: Sequence[int], parents: Sequence[int]
) -> dict[tuple[int, int], int]:
  """Returns the index of each node by that of its parent and its token."""
  pairs = zip(parents, token_ids, strict=True)
  return {pair: node for node, pair in enumerate(pairs)}
