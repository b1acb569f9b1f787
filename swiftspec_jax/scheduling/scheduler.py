"""Which rows run in a step, what they feed, and where their cache lies.

A request has known tokens (prompt and output so far), of which some are in the
cache. A row whose last known token alone is missing there decodes: it feeds
that token and its draft. A row that misses more is being filled, a chunk a
step. A request that lost its cache to others is filled again in the same way.

All of this is host work over arrays with one entry for each slot. No device and
no clock occur here, so a simulator and an engine can share it.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.scheduling.page_table import PageTable
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.scheduling.step_plan import StepPlan

_NOBODY = -1  # request of an empty slot
# Drafts have what prompts leave of a step, but at least one token of this
# many. In full steps a guess takes the place of a token that is certainly
# needed.
_DRAFT_SHARE = 16


_COUNTS = (
  *('request_id', 'num_known', 'num_remaining', 'limit'),
  *('num_output', 'num_verified', 'num_accepted'),
)
# What a request has with and without a slot.
_ROW = np.dtype([(x, np.int64) for x in _COUNTS])


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting:
  """A request without a slot."""

  row: np.void  # of _ROW
  page_keys: list[bytes]


class Scheduler:
  """Continuous batching: first come, first served, over slots and pages.

  A step is `begin_step`, `plan_step`, `commit`. Other steps may begin before
  the `commit` of one: until then it is unread, and a row counts with the most
  tokens that it may get. Requests may be submitted at any time, and cancelled
  except between `begin_step` and `plan_step`; `commit` leaves out rows that
  were cancelled meanwhile.

  Attributes:
    config: sizes of the engine.
    table: pages of the rows in the slots.
    request_ids: i64[slots], -1 where there is none.
    num_preemptions: number of times that a request lost its slot and cache.
    num_shared_tokens: tokens that were found in the cache by requests that got
      a slot.
    slot_generations: i64[slots] how often each slot was given to a request.
  """

  def __init__(self, config: SchedulerConfig):
    self.num_preemptions = 0
    self.num_shared_tokens = 0
    self.config = config
    self._waiting: collections.deque[_Waiting] = collections.deque()
    self._running: list[int] = []  # slots, the oldest row first
    self._num_steps = 0
    size = config.buckets.max_rows
    self.table = PageTable(config)
    self.slot_generations = np.zeros(size, np.int64)
    self._free_slots = list(range(size - 1, -1, -1))
    self._rows = np.zeros(size, _ROW)
    self.request_ids = self._rows['request_id']
    self.request_ids[:] = _NOBODY
    self._num_known = self._rows['num_known']
    self._num_remaining = self._rows['num_remaining']
    self._num_cached = np.zeros(size, np.int64)
    # Of unread steps: how many emit for a row, and the most tokens of them.
    self._num_unread = np.zeros(size, np.int64)
    self._num_ahead = np.zeros(size, np.int64)

  @property
  def num_waiting(self) -> int:
    return len(self._waiting)

  @property
  def num_running(self) -> int:
    return len(self._running)

  @property
  def is_short(self) -> bool:
    """Whether the next step has to take a row out, for want of memory.

    Only without unread steps.
    """
    return self._num_wanted() > self.table.num_free

  def submit(
    self,
    request_id: int,
    num_prompt_tokens: int,
    max_new_tokens: int,
    max_speculative_tokens: int | None = None,
    page_keys: Sequence[bytes] = (),
  ) -> None:
    """Puts a request at the end of the queue.

    Args:
      request_id: unique, at least 0.
      num_prompt_tokens: number of tokens of the prompt, at least 1.
      max_new_tokens: most tokens of the output, at least 1.
      max_speculative_tokens: longest draft that the request wants; None leaves
        it to the policy.
      page_keys: `page_table.keys_of` the prompt, if it may share pages.

    Raises:
      UserError: the request is longer than `max_context`, or would not fit into
        the cache even alone.
    """
    self.config.check(num_prompt_tokens, max_new_tokens)
    limit = self.config.buckets.max_length
    if max_speculative_tokens is not None:
      limit = min(limit, max_speculative_tokens)
    counts = request_id, num_prompt_tokens, max_new_tokens, limit, 0, 0, 0
    row = np.array(counts, _ROW)[()]
    self._waiting.append(_Waiting(row, list(page_keys)))

  def cancel(self, request_id: int) -> None:
    """Forgets a request; one that is not known has ended already."""
    for slot in self._running:
      if self.request_ids[slot] == request_id:
        self._release(slot)
        return
    for waiting in self._waiting:
      if waiting.row['request_id'] == request_id:
        self._waiting.remove(waiting)
        return

  def begin_step(self) -> policies.StepView | None:
    """Gives rows the memory they need; returns None if no row has to run."""
    if not self._grow():
      self._admit()
    slots = np.array(self._running, np.int64)
    missing = self._num_known[slots] - self._num_cached[slots]
    num_pending = prefill_kv_tokens = 0
    is_filling = missing > 1
    if is_filling.any():
      num_pending = int(missing[is_filling].sum())
      prefill_kv_tokens = int(self._num_cached[slots[is_filling]].sum())
    # Each unread step gives a token at least, which may be the last one.
    num_remaining = self._num_remaining - self._num_unread
    slots = slots[(missing == 1) & (num_remaining[slots] > 0)]
    if not len(slots) and not num_pending:
      return None
    buckets = self.config.buckets
    room = buckets.max_query_tokens - len(slots)
    num_prefill_tokens = min(num_pending, room)
    # The last token comes from the target, so it need not be drafted.
    rows = self._rows[slots]
    limits = np.minimum(rows['limit'], num_remaining[slots] - 1)
    return policies.StepView(
      step=self._num_steps,
      request_ids=rows['request_id'],
      slots=slots,
      kv_lengths=self._num_cached[slots],
      limits=np.minimum(limits, buckets.max_length),
      num_verified=rows['num_verified'],
      num_accepted=rows['num_accepted'],
      num_prefill_tokens=num_prefill_tokens,
      num_filling=np.count_nonzero(is_filling),
      prefill_kv_tokens=prefill_kv_tokens,
      max_draft_tokens=max(room - num_prefill_tokens, room // _DRAFT_SHARE),
      page_size=self.config.page_size,
      num_free_pages=self.table.num_free,
      num_spare_tokens=self.table.num_owned[slots] * self.config.page_size
      - self._most_tokens(slots),
      num_waiting=len(self._waiting),
      num_output=rows['num_output'],
      num_ahead=self._num_ahead[slots],
      buckets=buckets,
    )

  def reserve(self, view: policies.StepView, lengths: np.ndarray) -> None:
    """Gives drafts their pages before it is known what is verified of them.

    Args:
      view: result of `begin_step`.
      lengths: i64[B] draft tokens, as `StepView.shortened` returns them.
    """
    self.table.own(view.slots, self._most_tokens(view.slots, lengths))

  def plan_step(self, view: policies.StepView, lengths: np.ndarray) -> StepPlan:
    """Decides what every row feeds, and gives drafts their pages.

    Args:
      view: result of `begin_step`.
      lengths: i64[B] draft tokens to verify; made to fit by
        `StepView.shortened`.
    """
    if lengths.any():
      lengths = view.shortened(lengths)
      self.reserve(view, lengths)
    buckets = self.config.buckets
    slots, num_query_tokens = view.slots, lengths + 1
    if view.num_prefill_tokens:
      filling, sizes = self._chunks(int(num_query_tokens.sum()))
      slots = np.concatenate([slots, filling])
      num_query_tokens = np.concatenate([num_query_tokens, sizes])
      lengths = np.concatenate([lengths, np.zeros_like(filling)])
    starts = self._num_cached[slots]
    num_tokens = int(num_query_tokens.sum())
    step = StepPlan(
      request_ids=self.request_ids[slots],
      slots=slots,
      starts=starts,
      num_query_tokens=num_query_tokens,
      lengths=lengths,
      is_sampled=starts + num_query_tokens >= self._num_known[slots],
      num_ahead=self._num_ahead[slots],
      num_decoding=view.num_rows,
      shape=(len(slots), num_tokens),
      padded_rows=buckets.pad_rows(len(slots)),
      padded_query_tokens=buckets.pad_query_tokens(num_tokens),
    )
    self._num_steps += 1
    # What is not certain is added when the step is read.
    most_emitted = step.most_emitted
    self._num_cached[slots] += num_query_tokens - most_emitted
    self._num_ahead[slots] += most_emitted
    self._num_unread[slots] += step.is_sampled
    return step

  def settled(self, step: StepPlan) -> tuple[StepPlan, np.ndarray]:
    """Returns the oldest unread step as it was run, before its `commit`.

    Returns:
      The plan, with the tokens that its rows had and the draft tokens for which
      they had room, and bool[R] which rows are still there.
    """
    slots = step.slots
    is_present = self.request_ids[slots] == step.request_ids
    if not step.num_ahead.any():
      return step, is_present
    starts, lengths = step.starts.copy(), step.lengths
    decoding = slots[: step.num_decoding]
    starts[: step.num_decoding] = self._num_known[decoding] - 1
    if lengths.any():
      room = np.maximum(self._num_remaining[slots] - 1, 0)
      lengths = np.minimum(lengths, room)
    settled = dataclasses.replace(
      step,
      starts=starts,
      lengths=lengths,
      num_ahead=np.zeros_like(step.num_ahead),
    )
    return settled, is_present

  def commit(
    self,
    plan: StepPlan,
    num_accepted: np.ndarray,
    is_ended: np.ndarray | None = None,
  ) -> np.ndarray:
    """Takes the outcome of the oldest unread step.

    Args:
      plan: result of `plan_step`.
      num_accepted: i64[R] draft tokens that are part of the output.
      is_ended: bool[R] rows whose output ended before its token limit.

    Returns:
      i64[F] requests that have ended.
    """
    is_present = self.request_ids[plan.slots] == plan.request_ids
    if not is_present.all():
      plan, num_accepted = plan.only(is_present), num_accepted[is_present]
      is_ended = None if is_ended is None else is_ended[is_present]
    slots = plan.slots
    num_emitted = num_accepted + plan.is_sampled
    self._rows['num_verified'][slots] += plan.lengths
    self._rows['num_accepted'][slots] += num_accepted
    # What was rejected is in the cache, too, but after its end.
    self._num_cached[slots] += num_emitted
    self._num_known[slots] += num_emitted
    self._num_ahead[slots] -= plan.most_emitted
    self._num_unread[slots] -= plan.is_sampled
    self._rows['num_output'][slots] += num_emitted
    self._num_remaining[slots] -= num_emitted
    self.table.remember(slots, self._num_cached[slots])
    self.table.trim(slots, self._most_tokens(slots))
    has_ended = self._num_remaining[slots] <= 0
    if is_ended is not None:
      has_ended |= is_ended
    ended = slots[has_ended]
    request_ids = self.request_ids[ended]
    for slot in ended.tolist():
      self._release(slot)
    return request_ids

  def _grow(self) -> bool:
    """Gives rows pages for their tokens; returns whether one had to go."""
    had_to_go = False
    while (wanted := self._num_wanted()) > self.table.num_free:
      self._preempt(self._running[-1])
      had_to_go = True
    if wanted:
      slots = np.array(self._running, np.int64)
      self.table.own(slots, self._most_tokens(slots))
    return had_to_go

  def _num_wanted(self) -> int:
    """Returns how many pages rows lack for their tokens."""
    slots = np.array(self._running, np.int64)
    if (self.table.num_owned[slots] == self.table.pages.shape[1]).all():
      return 0  # as where each slot has a row of the cache
    wanted = self.table.count(self._most_tokens(slots))
    # A row may own more, for drafts of which only a part is verified.
    return int(np.maximum(wanted - self.table.num_owned[slots], 0).sum())

  def _most_tokens(self, slots: np.ndarray, more: np.ndarray | int = 0):
    """Returns the most tokens that rows may have, and `more` after them."""
    known, most = self._num_known[slots], self._num_ahead[slots] + more
    return known + np.minimum(most, self._num_remaining[slots])

  def _admit(self) -> None:
    """Gives slots to requests from the head of the queue."""
    while self._waiting and self._free_slots:
      waiting = self._waiting[0]
      num_known = int(waiting.row['num_known'])
      shared = self.table.find(waiting.page_keys, num_known)
      needed = self.table.num_missing(num_known, shared)
      # One page for each row that may lack some, or they would soon drive this
      # one out.
      num_owned = self.table.num_owned[self._running]
      num_growing = np.count_nonzero(num_owned < self.table.pages.shape[1])
      if needed + num_growing > self.table.num_free:
        return
      self._waiting.popleft()
      slot = self._free_slots.pop()
      self.slot_generations[slot] += 1
      self._running.append(slot)
      self._rows[slot] = waiting.row
      num_cached = self.table.begin(slot, waiting.page_keys, shared)
      self._num_cached[slot] = num_cached
      self.num_shared_tokens += num_cached
      self._num_unread[slot] = self._num_ahead[slot] = 0
      self.table.own(np.array([slot]), self._num_known[[slot]])

  def _preempt(self, slot: int) -> None:
    """Takes slot and cache from a row and puts it at the head of the queue."""
    if self._num_unread[slot]:
      raise ValueError(f'slot {slot} has unread steps')
    self.num_preemptions += 1
    row = self._rows[slot].copy()
    self._waiting.appendleft(_Waiting(row, self.table.keys(slot)))
    self._release(slot)

  def _release(self, slot: int) -> None:
    self.table.disown(slot)
    self.request_ids[slot] = _NOBODY
    self._running.remove(slot)
    self._free_slots.append(slot)

  def _chunks(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns slots to fill and the sizes of their chunks, i64[f] each.

    Args:
      num_tokens: number of tokens that other rows feed.
    """
    left = self.config.buckets.max_query_tokens - num_tokens
    chunks = {}
    for slot in self._running:
      missing = int(self._num_known[slot] - self._num_cached[slot])
      if missing > 1 and left > 0:
        chunks[slot] = min(missing, left)
        left -= chunks[slot]
    return np.array([*chunks], np.int64), np.array([*chunks.values()], np.int64)
