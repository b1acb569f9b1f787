"""Drafts of grammars alone.

The engine adds what a grammar forces to every draft, and to trees also the few
tokens that it leaves a choice of. This drafter has nothing else to say.
"""

import dataclasses

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import (
  HostDrafter,
  SlotTexts,
  trees_of,
)
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.step.slot_drafts import SlotDrafts


@dataclasses.dataclass(frozen=True)
class GrammarDraft(DraftSpec):
  """Drafter of an engine: trees of what grammars force and leave a choice of.

  Requests without `structured_outputs` have no draft.
  """

  makes_trees = True

  def make(self, setup: Setup) -> 'GrammarDrafter':
    return GrammarDrafter()


class GrammarDrafter(HostDrafter):
  """Drafts nothing itself."""

  name = 'grammar'

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    return trees_of(view, texts, {})
