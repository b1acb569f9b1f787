"""Prompt lookup on the host, which knows all tokens in an engine.

The drafts are those of `drafting.texts.prompt_lookup`, which compares the whole
text in every step, on the device. Here the places of n-grams are kept, so a
step costs some microseconds a row, and steps without drafts cost nothing.
"""

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafting.texts.prompt_lookup import PromptLookup
from swiftspec_jax.serving.drafters.engine_drafter import (
  HostDrafter,
  SlotTexts,
  chains_of,
)
from swiftspec_jax.step.slot_drafts import SlotDrafts


class NgramIndex:
  """The latest place of every n-gram of a text."""

  def __init__(self, smallest: int, largest: int):
    self._token_ids: list[int] = []
    self._sizes = range(largest, smallest - 1, -1)
    self._places: dict[tuple[int, ...], int] = {}

  @property
  def num_tokens(self) -> int:
    """Length of the text."""
    return len(self._token_ids)

  def extend(self, token_ids: list[int]) -> None:
    """Appends to the text."""
    for token_id in token_ids:
      # The n-gram at the end is only known once it is no longer the last.
      end = len(self._token_ids)
      for size in self._sizes:
        if size <= end:
          key = tuple(self._token_ids[end - size :])
          self._places[key] = end
      self._token_ids.append(token_id)

  def continuation(self, num_tokens: int) -> list[int]:
    """Returns what followed the longest, then latest match; [] without one.

    A continuation that runs into the end of the text goes on periodically.
    """
    end = len(self._token_ids)
    for size in self._sizes:
      if size <= end:
        place = self._places.get(tuple(self._token_ids[end - size :]))
        if place is not None:
          found = self._token_ids[place : place + num_tokens]
          repeats = -(-num_tokens // len(found))
          return (found * repeats)[:num_tokens]
    return []


class LookupDrafter(HostDrafter):
  """Prompt lookup for the rows of an engine."""

  def __init__(self, lookup: PromptLookup):
    self._lookup = lookup
    self._indices: dict[int, NgramIndex] = {}

  @property
  def name(self) -> str:
    return (
      f'prompt_lookup_{self._lookup.prompt_lookup_min}'
      f'_{self._lookup.prompt_lookup_max}'
    )

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    found = {}
    for row in np.flatnonzero(lengths).tolist():
      index = self._index(int(view.request_ids[row]))
      index.extend(texts.known_from(view, row, index.num_tokens))
      found[row] = index.continuation(int(lengths[row]))
    return chains_of(view, texts, found)

  def forget(self, request_id: int) -> None:
    self._indices.pop(request_id, None)

  def _index(self, request_id: int) -> NgramIndex:
    if request_id not in self._indices:
      self._indices[request_id] = NgramIndex(
        self._lookup.prompt_lookup_min, self._lookup.prompt_lookup_max
      )
    return self._indices[request_id]
