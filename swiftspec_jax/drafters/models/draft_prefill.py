"""What a draft model has read of the texts in the slots, and reads next.

The draft's first forward reads the last tokens of a text. A text of which more
is missing, such as a prompt or what was decoded without drafts, is late: it is
read before, in chunks of at most as many tokens as the target reads in a step.
There is at most one chunk a step, so that no prompt holds up the other rows. A
row has no draft before its text is read.

This is host work, which a simulator and an engine can share.

Legend: B rows of a view.
"""

import dataclasses

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefillPlan:
  """What a draft model reads before it drafts, and for whom it drafts.

  Attributes:
    starts: i64[B] numbers of tokens that it has of each row.
    chunks: i64[B] numbers of tokens that it reads next.
    is_ready: bool[B] rows whose other tokens are part of the first forward.
  """

  starts: np.ndarray
  chunks: np.ndarray
  is_ready: np.ndarray


class DraftPrefill:
  """Counts the tokens of each slot that a draft model has in its cache."""

  def __init__(self, buckets: StepBuckets, num_unread: int | None = 0):
    """Starts with empty slots.

    Args:
      buckets: declared sizes of a step.
      num_unread: last known tokens that a draft leaves nothing of in the cache;
        None if it has no cache, and reads nothing but the last one.
    """
    self._has_cache = num_unread is not None
    self._num_unread = num_unread or 0
    self._longest = buckets.max_length + self._num_unread
    self._budget = buckets.max_query_tokens
    self._num_cached = np.zeros(buckets.max_rows, np.int64)
    self._generations = np.zeros(buckets.max_rows, np.int64)

  def num_unread_tokens(
    self, view: policies.StepView, slot_generations: np.ndarray
  ) -> int:
    """Returns how many tokens the draft must read before all rows get drafts.

    Args:
      view: view of the step.
      slot_generations: i64[U] how often each slot was given to a request; its
        cache is empty when this changes.
    """
    self._num_cached[self._generations != slot_generations] = 0
    self._generations[:] = slot_generations
    missing = self._num_missing(view, view.limits)
    return int(missing[self._is_late(view, missing)].sum())

  def plan(self, view: policies.StepView, lengths: np.ndarray) -> PrefillPlan:
    """Plans a step; `num_unread_tokens` was asked before.

    Args:
      view: view of the step.
      lengths: i64[B] drafts that are wanted.
    """
    missing = self._num_missing(view, lengths)
    is_late = self._is_late(view, missing)
    order = np.argsort(missing, kind='stable')
    late = order[is_late[order]]
    chunks = np.zeros_like(missing)
    ends = np.minimum(np.cumsum(missing[late]), self._budget)
    chunks[late] = np.diff(ends, prepend=0)
    return PrefillPlan(
      starts=self._num_read(view),
      chunks=chunks,
      is_ready=(lengths > 0) & (~is_late | (chunks == missing)),
    )

  def take(self, view: policies.StepView, plan: PrefillPlan) -> None:
    """Notes that a plan was carried out, first forward included."""
    num_known = view.kv_lengths + 1 - self._num_unread
    taken = plan.starts + plan.chunks
    self._num_cached[view.slots] = np.where(plan.is_ready, num_known, taken)

  def keep(self, view: policies.StepView, counts: np.ndarray) -> None:
    """Notes that i64[B] accepted draft tokens are in the cache already."""
    self._num_cached[view.slots] += counts

  def _num_read(self, view: policies.StepView) -> np.ndarray:
    return self._num_cached[view.slots] if self._has_cache else view.kv_lengths

  def _num_missing(
    self, view: policies.StepView, lengths: np.ndarray
  ) -> np.ndarray:
    """Returns i64[B] without the last known tokens, which come with drafts."""
    missing = view.kv_lengths - self._num_read(view)
    return np.where(lengths > 0, missing, 0)

  def _is_late(
    self, view: policies.StepView, missing: np.ndarray
  ) -> np.ndarray:
    """Returns bool[B]: more is missing than a step with a draft leaves."""
    # Rows that miss least come first, and each has its last known token.
    order = np.argsort(missing, kind='stable')
    fits = np.zeros(len(missing), bool)
    room = self._budget - len(missing)
    fits[order] = np.cumsum(missing[order]) <= room
    return (missing > self._longest) | ~fits
