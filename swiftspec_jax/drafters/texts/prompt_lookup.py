"""Prompt lookup: continue as the text did after the same n-gram before.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); vLLM's
`ngram` method. Where steps are enqueued ahead it runs on the devices, so that
the host need not know the tokens. Else it runs on the host: a step costs some
ten microseconds a row, and steps without drafts cost nothing. Both compare the
whole text and find the same drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters.device_drafter import OnDevices
from swiftspec_jax.drafters.engine_drafter import (
  EngineDrafter,
  HostDrafter,
  SlotTexts,
  chains_of,
)
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.drafters.texts import continuations, text_match
from swiftspec_jax.models.model import Model
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
    chains, sizes = text_match.continue_longest(
      rows.token_ids,
      rows.lengths,
      self.prompt_lookup_max,
      self.num_speculative_tokens,
    )
    # Drafts of idle rows would make the step longer.
    has_draft = (sizes >= self.prompt_lookup_min) & (rows.room > 0)
    num_drafted = jnp.where(has_draft, self.num_speculative_tokens, 0)
    return chains, num_drafted

  @property
  def own_length(self) -> int:
    return self.num_speculative_tokens

  def runs_ahead(self, target: Model) -> bool:
    return True

  def make(self, setup: Setup) -> EngineDrafter:
    if not setup.run_ahead:
      return LookupDrafter(self)
    max_length = setup.sizes.scheduler.buckets.max_length  # as on the host
    lookup = dataclasses.replace(self, num_speculative_tokens=max_length)
    return OnDevices(drafter=lookup).make(setup)


class LookupDrafter(HostDrafter):
  """Prompt lookup for the rows of an engine."""

  def __init__(self, lookup: PromptLookup):
    self._lookup = lookup

  @property
  def name(self) -> str:
    return (
      f'prompt_lookup_{self._lookup.prompt_lookup_min}'
      f'_{self._lookup.prompt_lookup_max}'
    )

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    found = {
      row: self.continuation(texts.known(view, row), int(lengths[row]))
      for row in np.flatnonzero(lengths).tolist()
    }
    return chains_of(view, texts, found)

  def continuation(self, token_ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns what followed the longest, then latest match; [] without one.

    A continuation that runs into the end of the text goes on periodically.

    Args:
      token_ids: i32[any], the text.
      num_tokens: length of the result.
    """
    match = token_ids[-self._lookup.prompt_lookup_max :]
    found = token_ids[:0]
    places = continuations.places_after(token_ids, match)
    for size, after in enumerate(places, start=1):
      if not len(after):
        break
      if size >= self._lookup.prompt_lookup_min:
        found = token_ids[after[-1] :]
    if 0 < len(found) < num_tokens:
      return np.resize(found, num_tokens)
    return found[:num_tokens]
