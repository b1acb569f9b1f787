"""Drafters of an engine: tokens for some of the rows that decode.

Legend: B rows of a view, U slots, K longest draft, S tokens of the longest
text.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.drafters.texts.continuations import MergedTree
from swiftspec_jax.requests import Request
from swiftspec_jax.step import slot_trees
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.slot_drafts import SlotDrafts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotTexts:
  """What is known of the requests in the slots; the engine writes it.

  Attributes:
    token_ids: i32[U, S].
    slot_generations: i64[U] how often each slot was given to a request; its
      caches are empty when this changes.
    page_table: i32[U, any].
    requests: request of each slot, or its last one.
  """

  token_ids: np.ndarray
  slot_generations: np.ndarray
  page_table: np.ndarray
  requests: list[Request | None] = dataclasses.field(default_factory=list)

  @classmethod
  def empty(cls, max_context: int, page_table: np.ndarray) -> 'SlotTexts':
    """Returns texts of slots that nobody has had yet.

    Args:
      max_context: S.
      page_table: i32[U, any].
    """
    num_slots = len(page_table)
    return cls(
      token_ids=np.zeros((num_slots, max_context), np.int32),
      slot_generations=np.zeros(num_slots, np.int64),
      page_table=page_table,
      requests=[None] * num_slots,
    )

  def known(self, view: policies.StepView, row: int) -> np.ndarray:
    """Returns the tokens i32[any] of a row of a view."""
    # The last known token is not in the cache yet.
    return self.token_ids[view.slots[row], : view.kv_lengths[row] + 1]

  def known_from(
    self, view: policies.StepView, row: int, start: int
  ) -> list[int]:
    """Returns the tokens of a row of a view, from place `start` on."""
    return self.known(view, row)[start:].tolist()


def chains_of(
  view: policies.StepView,
  texts: SlotTexts,
  found: Mapping[int, Sequence[int] | np.ndarray],
  confidences: np.ndarray | None = None,
) -> SlotDrafts:
  """Returns drafts that were found on the host.

  Args:
    view: view of the step.
    texts: texts of all slots.
    found: tokens for rows of the view; the others have no draft.
    confidences: same as in `policies.Drafts`.
  """
  size = len(texts.token_ids), view.buckets.max_length
  token_ids = np.zeros(size, np.int32)
  lengths = np.zeros(view.num_rows, np.int64)
  for row, chain in found.items():
    token_ids[view.slots[row], : len(chain)] = chain
    lengths[row] = len(chain)
  drafts = policies.Drafts(lengths=lengths, confidences=confidences)
  return SlotDrafts(drafts=drafts, chains=token_ids)


def trees_of(
  view: policies.StepView,
  texts: SlotTexts,
  found: Mapping[int, MergedTree],
) -> SlotDrafts:
  """Returns trees that were found on the host.

  Args:
    view: view of the step.
    texts: texts of all slots.
    found: trees for rows of the view; the others have no draft.
  """
  size = len(texts.token_ids), view.buckets.max_length
  token_ids = np.zeros(size, np.int32)
  parents = np.full((size[0], size[1] + 1), tree_lib.NO_PARENT, np.int32)
  probs = np.zeros((size[1], view.num_rows))
  lengths = np.zeros(view.num_rows, np.int64)
  for row, tree in found.items():
    slot = view.slots[row]
    count = lengths[row] = len(tree.token_ids)
    token_ids[slot, :count] = tree.token_ids
    parents[slot, 1 : count + 1] = np.array(tree.parents, np.int32) + 1
    probs[:count, row] = tree.probs
  return SlotDrafts(
    drafts=policies.Drafts(lengths=lengths, node_confidences=probs.copy),
    trees=slot_trees.on_host(token_ids, parents),
  )


class EngineDrafter:
  """Base of drafters for rows: always chains, or always trees.

  Attributes:
    runs_ahead: whether it drafts after texts whose ends the host has not read.
    keeps_trees: whether its trees outlive a step, so that records of steps
      tell of them.
    has_programs: whether it runs programs on the devices.
  """

  runs_ahead = False
  keeps_trees = False
  has_programs = True

  @property
  def name(self) -> str:
    """For results, and for what costs depend on."""
    raise NotImplementedError

  def num_unread_tokens(self, view: policies.StepView, texts: SlotTexts) -> int:
    """Returns the unread tokens of a view; asked in each step before drafts."""
    return 0

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    """Drafts at most `lengths` i64[B] tokens; not called where all are 0."""
    raise NotImplementedError

  def overlap(
    self, view: policies.StepView, drafted: np.ndarray, verified: np.ndarray
  ) -> None:
    """Enqueues what may run while the target verifies; called in each step.

    Args:
      view: view of the step.
      drafted: i64[B] tokens that it has drafted.
      verified: i64[B] draft tokens, whoever drafted them, that are verified.
    """

  def commit(
    self,
    view: policies.StepView,
    drafted: np.ndarray,
    verified: np.ndarray,
    accepted: np.ndarray,
    is_present: np.ndarray,
  ) -> None:
    """Learns what was accepted, once the step has been read.

    Args:
      view: view of the step.
      drafted: same as in `overlap`.
      verified: same as in `overlap`.
      accepted: i64[B] of them.
      is_present: bool[B] rows whose requests have not ended before.
    """

  def forget(self, request_id: int) -> None:
    """A request has ended."""

  def reset(self) -> None:
    """Forgets what ended requests have taught; only without requests."""

  def compiling(self) -> Self:
    """Returns a drafter for another thread, whose `warm_up` runs nothing."""
    return self

  def warm_up(self, flat: StepSizes) -> None:
    """Goes through the programs for some sizes of a step that is not plain."""

  def trial(self, num_rows: int, num_known: int, length: int) -> None:
    """Drafts for invented rows on the devices and waits, to measure the time.

    Only without requests.

    Args:
      num_rows: declared size.
      num_known: tokens of each row; with the draft no more than the context.
      length: length of all drafts, at least 1.
    """

  def trial_prefill(self, num_rows: int, num_known: int) -> None:
    """Reads a chunk of late tokens and waits, to measure the time.

    Only without requests.

    Args:
      num_rows: declared size.
      num_known: tokens of each row after it.
    """


class HostDrafter(EngineDrafter):
  """Base of drafters that leave the devices alone."""

  has_programs = False


class NoDrafter(HostDrafter):
  """Has no draft for anybody."""

  name = 'none'
  runs_ahead = True

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    return chains_of(view, texts, {})
