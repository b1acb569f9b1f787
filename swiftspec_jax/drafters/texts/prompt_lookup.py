"""Prompt lookup: continue as the text did after the same n-gram before.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); vLLM's
`ngram` method. Where steps are enqueued ahead it runs on the devices, so that
the host need not know the tokens; it compares the whole text in every step.
Else the host keeps the places of n-grams: a step costs some microseconds a row,
and steps without drafts cost nothing. Both find the same drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters import device_drafter
from swiftspec_jax.drafters.engine_drafter import (
  EngineDrafter,
  HostDrafter,
  SlotTexts,
  chains_of,
)
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.drafters.texts import text_match
from swiftspec_jax.model import Model
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.stateless_drafter import StatelessDrafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(StatelessDrafter, DraftSpec):
  """Proposes what followed the longest earlier match of the last tokens.

  Attributes:
    num_speculative_tokens: tokens of a draft (K).
    prompt_lookup_min: shortest n-gram that counts as a match.
    prompt_lookup_max: longest n-gram that is compared. Of equally long
      matches the most recent wins.
  """

  num_speculative_tokens: int = 7
  prompt_lookup_min: int = 2
  prompt_lookup_max: int = 4

  def __post_init__(self):
    is_valid = self.num_speculative_tokens >= 1
    errors.check_fields(
      self, {'num_speculative_tokens': (is_valid, 'at least 1')}
    )
    if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
      raise errors.UserError(
        'prompt lookup needs 1 <= prompt_lookup_min <= prompt_lookup_max, got '
        f'{self.prompt_lookup_min} and {self.prompt_lookup_max}'
      )

  def propose(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
    token_ids, lengths = rows.token_ids, rows.lengths
    sizes = text_match.match_lengths(token_ids, lengths, self.prompt_lookup_max)
    # The longest, and of those the last.
    score = sizes * sizes.shape[1] + jnp.arange(sizes.shape[1])[None]
    place = jnp.argmax(score, axis=1)[:, None]
    length = jnp.take_along_axis(sizes, place, axis=1)[:, 0]
    chains = text_match.continuations(
      token_ids, lengths, place, self.num_speculative_tokens
    )
    # Drafts of idle rows would make the step longer.
    has_draft = (length >= self.prompt_lookup_min) & (rows.room > 0)
    num_drafted = jnp.where(has_draft, self.num_speculative_tokens, 0)
    return chains[:, 0], num_drafted

  @property
  def own_length(self) -> int:
    return self.num_speculative_tokens

  def runs_ahead(self, target: Model) -> bool:
    return target.config.vision is None  # only the host leaves out images

  def sees_images(self, setup: Setup) -> bool:
    return setup.run_ahead > 0

  def make(self, setup: Setup) -> EngineDrafter:
    if not setup.run_ahead:
      return LookupDrafter(self)
    max_length = setup.sizes.scheduler.buckets.max_length  # as on the host
    return device_drafter.make(
      dataclasses.replace(self, num_speculative_tokens=max_length), setup
    )


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
