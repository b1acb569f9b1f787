"""Drafts without a model: the row's own text and a store of others, as a tree.

SSSD (arXiv 2411.05894). Everything happens on the host, and nothing is kept of
a request, so no text gets from one request to another. The store is what its
owner put there.

Legend: B rows of a view, U slots, K longest draft, T = K + 1 nodes.
"""

import dataclasses

import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.serving.drafters import continuations
from swiftspec_jax.serving.drafters.engine_drafter import (
  HostDrafter,
  SlotDrafts,
  SlotTexts,
  trees_of,
)
from swiftspec_jax.serving.drafters.token_store import MAX_MATCH, TokenStore

_ENOUGH = 50  # continuations, for which no shorter match is looked up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datastore:
  """Drafter of an engine.

  Attributes:
    store: texts besides the row's own; None for none.
    max_match: last tokens of a row that are looked for in the store, at most.
    max_depth: most tokens of a continuation.
    max_places: places of a match that are looked at, in either text.
    min_prob: nodes that are less probable are not drafted.
  """

  store: TokenStore | None = None
  max_match: int = 8
  max_depth: int = 8
  max_places: int = 100
  min_prob: float = 0.01

  def __post_init__(self):
    checks = {
      'max_match': (1 <= self.max_match <= MAX_MATCH, f'1 to {MAX_MATCH}'),
      'max_depth': (self.max_depth >= 1, 'at least 1'),
      'max_places': (self.max_places >= 1, 'at least 1'),
      'min_prob': (0 <= self.min_prob < 1, 'in [0, 1)'),
    }
    errors.check_fields(self, checks)


class DatastoreDrafter(HostDrafter):
  """Trees of what followed the last tokens elsewhere."""

  def __init__(self, datastore: Datastore):
    self._datastore = datastore

  @property
  def name(self) -> str:
    datastore = self._datastore
    name = f'datastore_{datastore.max_match}_{datastore.max_depth}'
    if datastore.store is None:
      return name
    return f'{name}_{len(datastore.store.tokens)}'

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    found = {}
    for row in np.flatnonzero(lengths).tolist():
      # The last known token is not in the cache yet.
      end = view.kv_lengths[row] + 1
      text = texts.token_ids[view.slots[row], :end]
      found[row] = self.tree(text, int(lengths[row]))
    return trees_of(view, texts, found)

  def tree(self, text: np.ndarray, num_nodes: int) -> continuations.MergedTree:
    """Returns at most `num_nodes` nodes behind a text i32[any]."""
    datastore = self._datastore
    sources = [
      *continuations.of_own_text(
        text, datastore.max_depth, datastore.max_places
      ),
      *self._of_store(text),
    ]
    return continuations.merge(sources, num_nodes, datastore.min_prob)

  def _of_store(self, text: np.ndarray) -> list[continuations.Source]:
    """Returns what the store knows; shorter matches help out."""
    datastore = self._datastore
    if datastore.store is None:
      return []
    counts = continuations.Counts()
    match = text[-datastore.max_match :].tolist()
    while match and counts.count < _ENOUGH:
      for found in datastore.store.continuations(
        match, datastore.max_depth, datastore.max_places
      ):
        counts.add(found)
      match = match[1:]
    return [continuations.Source(counts=counts)]
