"""Drafters of text for a target that reads images (arXiv 2404.08856).

The draft's text is the target's without the places of images, and its positions
count these tokens alone. As its cache is shorter, it has pages of its own: on
the target's, requests that share the start of a prompt would need the same page
for different tokens.

Legend: B rows of a view, U slots, S tokens of the longest text.
"""

import dataclasses

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import (
  EngineDrafter,
  HostDrafter,
  SlotTexts,
)
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.verdicts import Verdicts


def sizes_of_draft(sizes: ProgramSizes) -> ProgramSizes:
  """Returns the sizes of a draft whose slots all have pages of their own."""
  config = sizes.scheduler
  num_pages = config.buckets.max_rows * _pages_of_slot(config)
  scheduler = dataclasses.replace(config, num_pages=num_pages)
  return dataclasses.replace(sizes, scheduler=scheduler)


def _pages_of_slot(config: SchedulerConfig) -> int:
  return -(-config.max_context // config.page_size)


class TextOnly:
  """A drafter that is told of texts without images."""

  def __init__(
    self, drafter: EngineDrafter, config: SchedulerConfig, is_image: np.ndarray
  ):
    """Starts with empty slots.

    Args:
      drafter: drafter that has `sizes_of_draft`, if it has a cache.
      config: sizes of the engine.
      is_image: bool[U, S] places of images in the target's texts; the target
        writes it.
    """
    self._drafter = drafter
    self._is_image = is_image
    shape = config.buckets.max_rows, _pages_of_slot(config)
    pages = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    self._texts = SlotTexts(
      token_ids=np.zeros((shape[0], config.max_context), np.int32),
      slot_generations=np.zeros(shape[0], np.int64),
      page_table=pages,
      num_left_out=np.zeros(shape[0], np.int64),
    )
    self._num_read = np.zeros(shape[0], np.int64)  # tokens of the target's text

  def _prefill(self, view: policies.StepView, texts: SlotTexts) -> None:
    """Copies what is new in the texts of a view."""
    own = self._texts
    is_new = own.slot_generations != texts.slot_generations
    own.slot_generations[:] = texts.slot_generations
    self._num_read[is_new] = own.num_left_out[is_new] = 0
    ends = (view.kv_lengths + 1).tolist()
    for slot, end in zip(view.slots.tolist(), ends, strict=True):
      start = int(self._num_read[slot])
      is_image = self._is_image[slot, start:end]
      new = texts.token_ids[slot, start:end][~is_image]
      place = start - int(own.num_left_out[slot])
      own.token_ids[slot, place : place + len(new)] = new
      own.num_left_out[slot] += is_image.sum()
      self._num_read[slot] = end

  def _of_text(self, view: policies.StepView) -> policies.StepView:
    """Returns a view with the lengths that the draft's texts have."""
    left_out = self._texts.num_left_out[view.slots]
    return dataclasses.replace(view, kv_lengths=view.kv_lengths - left_out)

  @property
  def name(self) -> str:
    return self._drafter.name

  @property
  def runs_ahead(self) -> bool:
    return self._drafter.runs_ahead

  @property
  def keeps_trees(self) -> bool:
    return self._drafter.keeps_trees

  @property
  def has_programs(self) -> bool:
    return self._drafter.has_programs

  def num_unread_tokens(self, view: policies.StepView, texts: SlotTexts) -> int:
    self._prefill(view, texts)
    return self._drafter.num_unread_tokens(self._of_text(view), self._texts)

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    self._prefill(view, texts)
    return self._drafter.draft(self._of_text(view), lengths, self._texts)

  def overlap(
    self, view: policies.StepView, drafted: np.ndarray, verified: np.ndarray
  ) -> None:
    self._drafter.overlap(self._of_text(view), drafted, verified)

  def commit(
    self,
    view: policies.StepView,
    drafted: np.ndarray,
    verified: np.ndarray,
    accepted: np.ndarray,
    is_present: np.ndarray,
  ) -> None:
    view = self._of_text(view)
    self._drafter.commit(view, drafted, verified, accepted, is_present)

  def forget(self, request_id: int) -> None:
    self._drafter.forget(request_id)

  def reset(self) -> None:
    self._drafter.reset()

  def compiling(self) -> EngineDrafter:
    return self._drafter.compiling()

  def warm_up(self, flat: StepSizes) -> None:
    self._drafter.warm_up(flat)

  def trial(self, num_rows: int, num_known: int, length: int) -> None:
    self._drafter.trial(num_rows, num_known, length)

  def trial_prefill(self, num_rows: int, num_known: int) -> None:
    self._drafter.trial_prefill(num_rows, num_known)


class TextOnlyHost(TextOnly, HostDrafter):
  """The same of a drafter that leaves the devices alone."""

  def learn(
    self, view: policies.StepView, lengths: np.ndarray, verdicts: Verdicts
  ) -> None:
    self._drafter.learn(self._of_text(view), lengths, verdicts)
