"""What has followed some tokens, from several sources, as one tree.

Each source counts continuations. The share of a token among those that followed
the same tokens estimates its probability, and the most probable nodes of all
sources together make the tree (SSSD, arXiv 2411.05894).
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

OWN_WEIGHT = 0.6  # of the row's own text, against 1 of a store
_OWN_MATCHES = 3  # longest match there
_OWN_FACTOR, _OWN_FACTOR_STEP = 0.6, 0.1


class Counts:
  """How often continuations went on in which way."""

  __slots__ = ('children', 'count')

  def __init__(self):
    self.count = 0
    self.children: dict[int, Counts] = {}

  def add(self, token_ids: Iterable[int]) -> None:
    """Counts a continuation."""
    self.count += 1
    node = self
    for token_id in token_ids:
      child = node.children.get(token_id)
      if child is None:
        child = node.children[token_id] = Counts()
      child.count += 1
      node = child


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
  """Continuations, and what they are worth.

  Attributes:
    counts: continuations.
    weight: factor on the probabilities of first tokens.
    factor: further factor with each token after them.
  """

  counts: Counts
  weight: float = 1.0
  factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergedTree:
  """Nodes after a text, the most probable first.

  Attributes:
    token_ids: token of each node.
    parents: index of the node above, which comes earlier; -1 for none.
    probs: probability of each node and those above it, not rising.
  """

  token_ids: list[int]
  parents: list[int]
  probs: list[float]


def places_after(
  token_ids: np.ndarray, match: Sequence[int] | np.ndarray
) -> Iterator[np.ndarray]:
  """Yields the places after the last 1, 2, ... tokens of a match, in order.

  Only places count that have a token.

  Args:
    token_ids: i32[any].
    match: tokens, at least one.
  """
  places = np.flatnonzero(token_ids[:-1] == match[-1]) + 1
  yield places
  for back, token_id in enumerate(match[-2::-1], start=2):
    places = places[places >= back]
    places = places[token_ids[places - back] == token_id]
    yield places


def of_own_text(
  token_ids: np.ndarray, length: int, most: int
) -> Iterator[Source]:
  """Yields what followed the last tokens of a text, for matches of 3, 2, 1.

  Args:
    token_ids: i32[any].
    length: most tokens of a continuation.
    most: number of places to look at, the latest.
  """
  found = places_after(token_ids, token_ids[-_OWN_MATCHES:])
  for size, places in reversed(list(enumerate(found, start=1))):
    counts = Counts()
    for place in places[-most:].tolist():
      counts.add(token_ids[place : place + length].tolist())
    factor = _OWN_FACTOR + _OWN_FACTOR_STEP * size
    yield Source(counts=counts, weight=OWN_WEIGHT, factor=factor)


def merge(
  sources: Iterable[Source], num_nodes: int, min_prob: float = 0.0
) -> MergedTree:
  """Returns the most probable nodes of all sources.

  A path that several sources know counts with the largest of its probabilities.
  Of equal ones the shorter path comes first, then the smaller one.

  Args:
    sources: counts of continuations, with their worth.
    num_nodes: most nodes.
    min_prob: probability that nodes have at least.
  """
  heap: list[tuple[float, int, tuple[int, ...], int, Counts, float]] = []
  tickets = itertools.count()

  def push(counts: Counts, prob: float, path: tuple[int, ...], factor: float):
    for token_id, child in counts.children.items():
      # Rounded, so that equal shares are equal.
      key = -round(prob * child.count / counts.count, 12)
      below = *path, token_id
      heapq.heappush(
        heap, (key, len(below), below, next(tickets), child, factor)
      )

  for source in sources:
    push(source.counts, source.weight, (), source.factor)
  nodes: dict[tuple[int, ...], int] = {}
  probs: list[float] = []
  while heap and len(nodes) < num_nodes:
    key, _, path, _, counts, factor = heapq.heappop(heap)
    if -key < min_prob:
      break
    if path not in nodes:
      nodes[path] = len(nodes)
      probs.append(-key)
    push(counts, -key * factor, path, factor)
  return MergedTree(
    token_ids=[path[-1] for path in nodes],
    parents=[nodes.get(path[:-1], -1) for path in nodes],
    probs=probs,
  )
