"""The host loop: rows of a batch, dispatched ahead and read late.

A round is dispatched before the one before it has been read, so the devices
never wait for Python; a row that turns out to have ended is cut, and its
surplus is never emitted.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import jax

from swiftspec_jax import buckets, errors, types
from swiftspec_jax import requests as requests_lib
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.drafting.draft_model import DraftModel
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import Pipeline
from swiftspec_jax.pipelines.chain import ChainPipeline
from swiftspec_jax.pipelines.tree import TreePipeline
from swiftspec_jax.requests import Event, Request, Row


class Decoder:
  """Decodes requests with one target, one drafter and `batch_size` rows.

  Attributes:
    host_seconds: work of the host so far, waits excluded, in processor time of
      its thread: where the CPU is also the device, the thread may have to wait
      for a core.
    pipeline: what runs on the devices.
  """

  def __init__(
    self,
    target: Model,
    draft: Model | Drafter | None = None,
    *,
    num_speculative_tokens: int | None = None,
    tree: TreeConfig | None = None,
    batch_size: int = 1,
    run_ahead: int = 1,
    timeline: timeline_lib.Timeline | None = None,
  ):
    """Checks that the parts fit; compiles and allocates nothing yet.

    Args:
      target: defines the output.
      draft: how to speculate: a model, a drafter such as `PromptLookup()`, or
        None for plain decoding.
      num_speculative_tokens: K of a draft model that drafts a chain; a drafter
        has its own.
      tree: a draft model grows a token tree of these sizes instead of a
        chain. On the target's devices the two take turns; on others the tree
        grows while the target verifies.
      batch_size: B, rows that decode together.
      run_ahead: rounds that are dispatched before one is read; 0 waits for
        each.
      timeline: notes when the programs of a tree's rounds ran.

    Raises:
      UserError: the draft has another vocabulary or other devices, or a count
        is out of range.
    """
    for name, value, least in (
      ('batch_size', batch_size, 1),
      ('run_ahead', run_ahead, 0),
    ):
      if value < least:
        raise errors.UserError(f'{name} must be at least {least}, got {value}')
    self.host_seconds = 0.0
    self._lock = threading.Lock()  # held by who uses the rows
    self._target = target
    self._batch_size = batch_size
    self._run_ahead = run_ahead
    self._timeline = timeline
    self.pipeline: Pipeline
    if tree is None:
      drafter = _drafter(target, draft, num_speculative_tokens)
      params = draft.params if isinstance(draft, Model) else None
      self.pipeline = ChainPipeline(target, drafter, params, batch_size)
    else:
      _check_tree_draft(target, draft, num_speculative_tokens)
      self.pipeline = TreePipeline(
        target, draft, tree, batch_size=batch_size, timeline=timeline
      )
    self._num_tokens = self.pipeline.num_speculative_tokens
    window = target.config.sliding_window
    if window is not None and window <= self._num_tokens:
      raise errors.UserError(
        f'{self._num_tokens} speculative tokens a round must be less than the '
        f"target's sliding window of {window}"
      )

  def run(self, requests: Sequence[Request]) -> Iterator[Event]:
    """Decodes requests; yields news of each as it becomes certain.

    Closing the iterator early stops the decoding. A decoder has rows for one
    iterator at a time.

    Raises:
      UserError: an empty prompt, a prompt that leaves no room in the
        context, or a token id outside the vocabulary; at the call, not at
        the first event. At the first event: an earlier iterator of this
        decoder has not ended.
    """
    waiting = collections.deque(
      Row(i, request, self._check(request), self._target, self._num_tokens)
      for i, request in enumerate(requests)
    )
    return self._run(waiting) if waiting else iter(())

  def _run(self, waiting: collections.deque[Row]) -> Iterator[Event]:
    with self._own_rows():
      yield from self._decode(waiting)

  @contextlib.contextmanager
  def _own_rows(self) -> Iterator[None]:
    """Keeps the rows from other users until it ends."""
    if not self._lock.acquire(blocking=False):
      raise errors.UserError(
        'this decoder is busy with another iterator of `run`; read that to its '
        'end or `close()` it first, or take another decoder'
      )
    try:
      yield
    finally:
      self._lock.release()

  def _decode(self, waiting: collections.deque[Row]) -> Iterator[Event]:
    features = [row.request.sampling for row in waiting]
    self.pipeline.prepare(max(row.limit for row in waiting), features)
    rows: list[Row | None] = [None] * self._batch_size
    in_flight = collections.deque()
    try:
      while waiting or any(rows):
        for slot, row in enumerate(rows):
          if row is None and waiting:
            rows[slot] = waiting.popleft()
            self._admit(rows[slot], slot, features)
        in_flight.append((self.dispatch(), tuple(rows)))
        if len(in_flight) > self._run_ahead:
          yield from self._read(*in_flight.popleft())
          for slot, row in enumerate(rows):
            if row is not None and row.is_finished:
              self.pipeline.stop(slot)
              rows[slot] = None
    finally:
      # The surplus must not delay whoever comes next.
      jax.block_until_ready([output for output, _ in in_flight])

  def dispatch(self) -> types.StepOutput:
    """Enqueues one round for the rows at hand; does not wait for its output.

    `run` does this; alone it is for measuring rounds without the host loop.
    """
    start, work = time.perf_counter(), time.thread_time()
    with jax.transfer_guard('disallow'):  # implicit transfers would wait
      output = self.pipeline.dispatch()
    self.host_seconds += time.thread_time() - work
    self._note('dispatch', start, time.perf_counter())
    return output

  def _read(
    self, output: types.StepOutput, rows: Sequence[Row | None]
  ) -> list[Event]:
    """Waits for a round and hands each row its part."""
    start = time.perf_counter()
    packed, logprobs = jax.device_get((output.packed, output.logprobs))
    arrived, work = time.perf_counter(), time.thread_time()
    events, reports = [], []
    for slot, row in enumerate(rows):
      if row is None or row.is_finished:
        continue
      report = types.StepReport.unpack(packed[slot])
      reports.append(report)
      own = jax.tree.map(lambda x, slot=slot: x[slot], logprobs)
      event = row.push(report, own)
      if event is not None:
        events.append(event)
    self.pipeline.observe(reports)
    self.host_seconds += time.thread_time() - work
    self._note('wait', start, arrived)
    self._note('read', arrived, time.perf_counter())
    return events

  def _note(self, name: str, start: float, end: float) -> None:
    if self._timeline is not None:
      self._timeline.host(name, start, end)

  def warmup(
    self,
    max_total_tokens: int,
    sampling: SamplingParams = SamplingParams(),
  ) -> None:
    """Compiles all that requests of up to so many tokens can need.

    Args:
      max_total_tokens: prompt and output together.
      sampling: stands for the features that requests will use.

    Raises:
      UserError: an iterator of this decoder has not ended.
    """
    limit = min(max_total_tokens, self._target.config.max_context)
    capacity = buckets.SMALLEST
    with self._own_rows():
      while capacity < limit:
        self._warmup_capacity(capacity, sampling)
        capacity *= 2
      self._warmup_capacity(limit, sampling)

  def _warmup_capacity(self, limit: int, sampling: SamplingParams) -> None:
    """Runs every program of the cache that requests of `limit` tokens get."""
    self.pipeline.prepare(limit, [sampling])
    capacity = self.pipeline.capacity
    chunks = {}  # one for each program
    for length in range(1, limit):
      for chunk in buckets.plan_prefill(length - 1, capacity):
        start, size, _ = chunk
        context = buckets.context_of(start + size, capacity)
        chunks.setdefault((size, context), chunk)
    request = Request(token_ids=(0,), sampling=sampling)
    self.pipeline.admit(0, request, limit, [sampling], chunks.values())
    self.pipeline.warmup()

  def _check(self, request: Request) -> int:
    """Returns the length at which the request must end."""
    max_context = self._target.config.max_context
    requests_lib.check(request, self._target, max_context, self._target.name)
    max_new_tokens = request.sampling.max_new_tokens or max_context
    return min(len(request.token_ids) + max_new_tokens, max_context)

  def _admit(
    self, row: Row, slot: int, features: Sequence[SamplingParams]
  ) -> None:
    row.start()
    # The last token of the prompt is the root of the first round.
    num_tokens = len(row.request.token_ids) - 1
    chunks = buckets.plan_prefill(num_tokens, self.pipeline.capacity)
    self.pipeline.admit(slot, row.request, row.limit, features, chunks)
    row.end_prefill()


def _drafter(
  target: Model,
  draft: Model | Drafter | None,
  num_speculative_tokens: int | None,
) -> Drafter:
  """Returns the drafter that `draft` stands for."""
  if not isinstance(draft, Model):
    if num_speculative_tokens is not None:
      raise errors.UserError(
        f'num_speculative_tokens={num_speculative_tokens} is for a draft '
        'model; other drafters have it as a field of their own'
      )
    return NoDraft() if draft is None else draft
  tokenizer_lib.check_same_vocabulary(
    target.name, target.tokenizer, draft.name, draft.tokenizer
  )
  if draft.mesh != target.mesh:
    raise errors.UserError(
      f'{draft.name} lies on other devices than {target.name}; load both with '
      'the same `devices`, or give `tree` for asynchronous drafting'
    )
  return DraftModel(
    config=draft.config,
    dtype_name=draft.dtype.name,
    num_speculative_tokens=(
      4 if num_speculative_tokens is None else num_speculative_tokens
    ),
  )


def _check_tree_draft(
  target: Model,
  draft: Model | Drafter | None,
  num_speculative_tokens: int | None,
) -> None:
  if not isinstance(draft, Model):
    raise errors.UserError(
      f'a tree needs a draft model, got {"none" if draft is None else draft}'
    )
  if num_speculative_tokens is not None:
    raise errors.UserError(
      f'num_speculative_tokens={num_speculative_tokens} is for chains; a tree '
      'has the sizes of its TreeConfig'
    )
  tokenizer_lib.check_same_vocabulary(
    target.name, target.tokenizer, draft.name, draft.tokenizer
  )
