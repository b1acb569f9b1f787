"""Drafts of any quality: knows the output, and errs as often as it is told.

For studying policies without a good draft. What requests have written is
remembered, and a request that begins like one of them is drafted what that one
wrote, with mistakes at places that are drawn once for each text. So all
policies have the same luck, and the output stays the target's own.
"""

import dataclasses

import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters.engine_drafter import (
  HostDrafter,
  SlotTexts,
  chains_of,
)
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.step.slot_drafts import SlotDrafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedDraft(DraftSpec):
  """Drafter of an engine.

  Attributes:
    acceptance: probability that a draft token is the right one.
  """

  acceptance: float

  def __post_init__(self):
    is_valid = 0 <= self.acceptance <= 1
    errors.check_fields(self, {'acceptance': (is_valid, '0 to 1')})

  def make(self, setup: Setup) -> 'ForcedDrafter':
    return ForcedDrafter(self)


class ForcedDrafter(HostDrafter):
  """Drafts for requests whose like has been served before."""

  def __init__(self, draft: ForcedDraft):
    self._draft = draft
    self._texts: dict[int, list[int]] = {}
    self.reset()

  @property
  def name(self) -> str:
    return f'forced_{self._draft.acceptance:g}'

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    found = {}
    for row in np.flatnonzero(lengths).tolist():
      text = self._texts.setdefault(int(view.request_ids[row]), [])
      text.extend(texts.known_from(view, row, len(text)))
      found[row] = self._continuation(text)[: lengths[row]]
    return chains_of(view, texts, found)

  def forget(self, request_id: int) -> None:
    text = np.array(self._texts.pop(request_id, []), np.int64)
    if any(np.array_equal(past[: len(text)], text) for past, _ in self._past):
      return
    generator = np.random.default_rng(len(self._past))
    is_right = generator.random(len(text)) < self._draft.acceptance
    mistakes = np.where(text > 0, text - 1, 1)
    self._past.append((text, np.where(is_right, text, mistakes)))

  def reset(self) -> None:
    # i64[n] what ended requests knew, and the same with mistakes.
    self._past: list[tuple[np.ndarray, np.ndarray]] = []

  def _continuation(self, text: list[int]) -> np.ndarray:
    """Returns what was written after a text, i64[any]."""
    for past, with_mistakes in self._past:
      if len(past) > len(text) and np.array_equal(past[: len(text)], text):
        return with_mistakes[len(text) :]
    return np.zeros(0, np.int64)
