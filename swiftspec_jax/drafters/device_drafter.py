"""Drafters that look at the texts on the target's devices.

They draft after texts whose ends the host has not read, so that steps can be
enqueued ahead. How many tokens there were the host learns with the verdict.

Legend: B rows of a view, U slots, K longest draft.
"""

import copy
import dataclasses
from typing import Self

import jax
import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import EngineDrafter, SlotTexts
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.models.model import Model
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.slot_drafts import Search, SlotDrafts
from swiftspec_jax.step.stateless_drafter import StatelessDrafter
from swiftspec_jax.step.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDevices(DraftSpec):
  """A drafter of the user's own that needs no state."""

  drafter: StatelessDrafter

  @property
  def own_length(self) -> int:
    return self.drafter.num_speculative_tokens

  def runs_ahead(self, target: Model) -> bool:
    return True

  def make(self, setup: Setup) -> 'DeviceDrafter':
    return DeviceDrafter(self.drafter, setup.target)


class DeviceDrafter(EngineDrafter):
  """Asks a `StatelessDrafter` for chains."""

  runs_ahead = True

  def __init__(self, drafter: StatelessDrafter, target: Target):
    """Allocates nothing.

    Args:
      drafter: drafter that needs neither parameters nor a state.
      target: target whose texts it reads.
    """
    self._drafter = drafter
    self._target = target
    self._none_wanted = np.zeros(len(target.rows.lengths), np.int32)

  @property
  def name(self) -> str:
    return repr(self._drafter)

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    wanted = self._none_wanted.copy()
    wanted[view.slots] = lengths
    return SlotDrafts(
      drafts=policies.Drafts(lengths=lengths), search=self.search(wanted)
    )

  def search(self, wanted: np.ndarray | None = None) -> Search:
    """Returns what a step is to look up, by default nothing.

    Args:
      wanted: i32[U] tokens.
    """
    if wanted is None:
      wanted = self._none_wanted
    return Search(drafter=self._drafter, wanted=wanted)

  def compiling(self) -> Self:
    twin = copy.copy(self)
    twin._target = self._target.compiling()
    return twin

  def warm_up(self, flat: StepSizes) -> None:
    chains, _ = self._target.find(self.search())
    self._target.trees_of(chains)

  def trial(self, num_rows: int, num_known: int, length: int) -> None:
    jax.block_until_ready(self._target.find(self.search()))
