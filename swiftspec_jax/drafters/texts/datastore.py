"""Drafts without a model: the row's own text and a store of others, as a tree.

SSSD (arXiv 2411.05894). Everything happens on the host. Unless it is asked to
learn, nothing is kept of a request, so no text gets from one request to
another. The store is what its owner put there.

Legend: B rows of a view, U slots, K longest draft, T = K + 1 nodes.
"""

import dataclasses

import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters.engine_drafter import (
  HostDrafter,
  SlotTexts,
  trees_of,
)
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.drafters.texts import continuations
from swiftspec_jax.drafters.texts.past_texts import PastTexts
from swiftspec_jax.drafters.texts.token_store import MAX_MATCH, TokenStore
from swiftspec_jax.step.slot_drafts import SlotDrafts

_ENOUGH = 50  # continuations, for which no shorter match is looked up
_NUM_BEFORE = 3  # tokens of a prompt that are kept with the output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datastore(DraftSpec):
  """Drafter of an engine.

  Attributes:
    store: texts besides the row's own; None for none.
    max_match: last tokens of a row that are looked for in the store, at most.
    max_depth: most tokens of a continuation.
    max_places: places of a match that are looked at, in either text.
    min_prob: nodes that are less probable are not drafted.
    num_past_tokens: tokens of outputs of ended requests that are kept and
      looked up, too, the latest ones.
  """

  makes_trees = True

  store: TokenStore | None = None
  max_match: int = 8
  max_depth: int = 8
  max_places: int = 100
  min_prob: float = 0.01
  num_past_tokens: int = 0

  def __post_init__(self):
    checks = {
      'max_match': (1 <= self.max_match <= MAX_MATCH, f'1 to {MAX_MATCH}'),
      'max_depth': (self.max_depth >= 1, 'at least 1'),
      'max_places': (self.max_places >= 1, 'at least 1'),
      'min_prob': (0 <= self.min_prob < 1, 'in [0, 1)'),
      'num_past_tokens': (self.num_past_tokens >= 0, '0 or more'),
    }
    errors.check_fields(self, checks)

  def make(self, setup: Setup) -> 'DatastoreDrafter':
    if self.store is not None:
      model = setup.target.model
      self.store.check(model.name, model.tokenizer)
    return DatastoreDrafter(self)


class DatastoreDrafter(HostDrafter):
  """Trees of what followed the last tokens elsewhere.

  Attributes:
    past: outputs of ended requests.
  """

  def __init__(self, datastore: Datastore):
    self._datastore = datastore
    self._outputs: dict[int, np.ndarray] = {}
    self.reset()

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
      text = texts.known(view, row)
      found[row] = self.tree(text, int(lengths[row]))
      if self._datastore.num_past_tokens:
        start = max(len(text) - view.num_output[row] - _NUM_BEFORE, 0)
        self._outputs[int(view.request_ids[row])] = text[start:].copy()
    return trees_of(view, texts, found)

  def forget(self, request_id: int) -> None:
    output = self._outputs.pop(request_id, None)
    if output is not None:
      self.past.add(output)

  def reset(self) -> None:
    self.past = PastTexts(self._datastore.num_past_tokens)

  def tree(self, text: np.ndarray, num_nodes: int) -> continuations.MergedTree:
    """Returns at most `num_nodes` nodes after a text i32[any]."""
    datastore = self._datastore
    sources = [
      *continuations.of_own_text(
        text, datastore.max_depth, datastore.max_places
      ),
      self._of_others(text),
    ]
    return continuations.merge(sources, num_nodes, datastore.min_prob)

  def _of_others(self, text: np.ndarray) -> continuations.Source:
    """Returns what other texts know; shorter matches help out."""
    datastore = self._datastore
    counts = continuations.Counts()
    match = text[-datastore.max_match :].tolist()
    options = datastore.max_depth, datastore.max_places
    while match and counts.count < _ENOUGH:
      if datastore.store is not None:
        for found in datastore.store.continuations(match, *options):
          counts.add(found)
      for found in self.past.continuations(match, *options):
        counts.add(found)
      match = match[1:]
    return continuations.Source(counts=counts)
