"""Drafters of text for a target that reads images (arXiv 2404.08856).

The draft's text is the target's without the places of images, and its positions
count these tokens alone. As its cache is shorter, it has pages of its own: on
the target's, requests that share the start of a prompt would need the same page
for different tokens.

Legend: B rows of a view, U slots, S tokens of the longest text.
"""

import dataclasses
from typing import Any

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import EngineDrafter, SlotTexts
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.slot_drafts import SlotDrafts


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
    self._texts = dataclasses.replace(
      SlotTexts.empty(config.max_context, pages),
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

  def num_unread_tokens(self, view: policies.StepView, texts: SlotTexts) -> int:
    self._prefill(view, texts)
    return self._drafter.num_unread_tokens(self._of_text(view), self._texts)

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    self._prefill(view, texts)
    return self._drafter.draft(self._of_text(view), lengths, self._texts)

  def overlap(self, view: policies.StepView, *counts: np.ndarray) -> None:
    self._drafter.overlap(self._of_text(view), *counts)

  def commit(self, view: policies.StepView, *counts: np.ndarray) -> None:
    self._drafter.commit(self._of_text(view), *counts)

  def __getattr__(self, name: str) -> Any:
    """Returns what has to do with no text."""
    return getattr(self._drafter, name)
