"""An engine whose requests each have a row of the caches to themselves.

The host enqueues rounds ahead and reads them late, so that the devices never
wait for Python. A row that turns out to have ended is stopped; what it decoded
in rounds that were on their way is never emitted.
"""

import collections
import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from swiftspec_jax import buckets, errors, sharding, types
from swiftspec_jax import requests as requests_lib
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.engine import engine
from swiftspec_jax.engine.handles import Handle
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.engine.programs import FewPrograms
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines.make import make_pipeline
from swiftspec_jax.requests import Request


class RowEngine(engine.Engine[Job]):
  """Decodes in the rows of a pipeline; rows join and leave between rounds.

  Attributes:
    host_seconds: sum of those of all steps so far.
    pipeline: states on the devices, and the programs of a round.
  """

  limits_drafts = False  # all rows share the sizes of a round

  def __init__(
    self,
    target: Model,
    draft: Model | Drafter | None = None,
    *,
    num_speculative_tokens: int | None = None,
    tree: TreeConfig | None = None,
    max_rows: int = 1,
    max_context: int | None = None,
    run_ahead: int = 1,
    timeline: timeline_lib.Timeline | None = None,
  ):
    """Checks that the parts fit; compiles and allocates nothing yet.

    Args:
      target: model that defines the output.
      draft: way to speculate: a model, a drafter such as `PromptLookup()`, or
        None for plain decoding.
      num_speculative_tokens: length of a draft model's chain; a drafter has
        its own.
      tree: sizes of the token tree that a draft model grows instead of a
        chain. On the target's devices the two take turns; on others the tree
        grows while the target verifies.
      max_rows: requests that decode together.
      max_context: most tokens of a request, prompt and output together; those
        of the target by default.
      run_ahead: rounds that are dispatched before one is read; 0 waits for
        each.
      timeline: record of when the programs of a tree's rounds ran.

    Raises:
      UserError: the draft has another vocabulary or other devices, or a count
        is out of range.
    """
    for name, value, least in (
      ('batch_size', max_rows, 1),
      ('run_ahead', run_ahead, 0),
    ):
      if value < least:
        raise errors.UserError(f'{name} must be at least {least}, got {value}')
    longest = target.config.max_context
    if max_context is not None and max_context > longest:
      raise errors.UserError(
        f'max_context={max_context} is more than the {longest} tokens that '
        f'{target.name} takes'
      )
    super().__init__()
    self.pipeline = make_pipeline(
      target,
      draft,
      num_speculative_tokens=num_speculative_tokens,
      tree=tree,
      batch_size=max_rows,
      timeline=timeline,
    )
    self.max_rows = max_rows
    self.max_context = max_context or longest
    self.max_draft_tokens = self.pipeline.num_speculative_tokens
    self.programs = FewPrograms(self._plan_warm_up)
    self.host_seconds = 0.0
    self.model = target
    # Beside trees, lookups draft chains.
    self._chains_by_model = tree is None and isinstance(draft, Model)
    self._run_ahead = run_ahead
    self._timeline = timeline
    self._last_arrival = math.nan  # time of the latest output
    self._waiting: collections.deque[Job] = collections.deque()
    self._rows: list[Job | None] = [None] * max_rows
    # Rounds that have not been read, with who had the rows.
    self._in_flight: collections.deque[
      tuple[types.StepOutput, tuple[Job | None, ...]]
    ] = collections.deque()

  @property
  def num_running(self) -> int:
    return self.max_rows - self._rows.count(None)

  @property
  def cache_usage(self) -> float:
    return self.num_running / self.max_rows

  @property
  def num_preemptions(self) -> int:
    return 0  # each row has room for the longest request

  def prepare(
    self, max_total_tokens: int, sampling: Sequence[SamplingParams] = ()
  ) -> None:
    """Makes room in each row; only without requests.

    Args:
      max_total_tokens: most tokens of a request, prompt and output together.
      sampling: parameters that requests will use. Others are served, too, but
        the first one with a new feature waits for a compilation.
    """
    self.drain()
    self.pipeline.prepare(max_total_tokens, sampling)

  def drain(self) -> None:
    """Waits for the rounds that are on their way; only without requests."""
    jax.block_until_ready([output for output, _ in self._in_flight])
    self._in_flight.clear()
    self._last_arrival = math.nan

  def _plan_warm_up(self) -> list[Callable[[], None]]:
    limit = self.max_context
    steps = self._warm_up_steps(limit, SamplingParams())
    return [*steps, functools.partial(self.prepare, limit)]

  def warm_up_to(self, limit: int, sampling: SamplingParams) -> None:
    """Compiles all that requests of up to `limit` tokens need.

    Args:
      limit: most tokens of a request, prompt and output together.
      sampling: parameters that use the same features as the requests to come.
    """
    capacity = buckets.SMALLEST
    while capacity < limit:
      self._warm_up_capacity(capacity, sampling)
      capacity *= 2
    self._warm_up_capacity(limit, sampling)

  def _warm_up_capacity(self, limit: int, sampling: SamplingParams) -> None:
    for run in self._warm_up_steps(limit, sampling):
      run()

  def _warm_up_steps(
    self, limit: int, sampling: SamplingParams
  ) -> list[Callable[[], None]]:
    """Returns what runs every program that requests of `limit` tokens need.

    Allocates the caches for them.
    """
    self.prepare(limit, [sampling])
    capacity = self.pipeline.capacity
    # Of each program the first and the last one that a prompt can need.
    first: dict[tuple[int, int], buckets.Chunk] = {}
    last: dict[tuple[int, int], buckets.Chunk] = {}
    for length in range(1, limit):
      for chunk in buckets.plan_prefill(length - 1, capacity):
        start, size, _ = chunk
        program = size, buckets.context_of(start + size, capacity)
        first.setdefault(program, chunk)
        last[program] = chunk
    chunks = sorted({*first.values(), *last.values()})
    request = Request(token_ids=(0,), sampling=sampling)
    admit = functools.partial(self.pipeline.admit, 0, request, limit)
    return [
      *(functools.partial(admit, [chunk]) for chunk in chunks),
      functools.partial(admit, []),
      self.pipeline.warmup,
    ]

  def step(self) -> engine.StepRecord | None:
    """Reads a round, behind those that are enqueued for the rows at hand.

    Returns:
      What the round did; None if no row is busy and all rounds are read.
    """
    start, work = time.perf_counter(), time.thread_time()
    self._take_news()
    self._admit()
    while self.num_running and len(self._in_flight) <= self._run_ahead:
      self._in_flight.append((self.dispatch(), tuple(self._rows)))
    if not self._in_flight:
      return None
    read = self._read(*self._in_flight.popleft())
    for slot, job in enumerate(self._rows):
      if job is not None and job.is_finished:
        del self._jobs[job.request_id]
        self._stop(slot)
    end = time.perf_counter()
    reports = [report for _, report, _ in read]
    # That of a request's first round is no verdict's.
    outcomes = [
      report.outcome
      for handle, report, _ in read
      if report.outcome != types.NO_OUTCOME and handle.num_updates > 1
    ]
    host_seconds = time.thread_time() - work
    self.host_seconds += host_seconds
    return engine.StepRecord(
      lengths=np.array([r.num_drafted for r in reports], np.int64),
      num_levels=np.array([r.num_levels for r in reports], np.int64),
      num_accepted=np.array([max(n - 1, 0) for _, _, n in read], np.int64),
      time=end,
      seconds=end - start,
      host_seconds=host_seconds,
      outcomes=np.bincount(outcomes, minlength=tree_lib.NUM_OUTCOMES),
      num_forwards=max((r.num_forwards for r in reports), default=0),
    )

  def dispatch(self) -> types.StepOutput:
    """Enqueues one round for the rows at hand; does not wait for its output.

    `step` does this; alone it is for measuring rounds without the host loop.
    """
    start = time.perf_counter()
    with jax.transfer_guard('disallow'):  # implicit transfers would wait
      output = sharding.everywhere(self.pipeline.dispatch())
    self._note('dispatch', start, time.perf_counter())
    return output

  def _read(
    self, output: types.StepOutput, jobs: Sequence[Job | None]
  ) -> list[tuple[Handle, types.StepReport, int]]:
    """Waits for a round and hands each request its part.

    Returns:
      Of each row in use the handle, what was read, and the number of tokens
      that its output has got.
    """
    start = time.perf_counter()
    packed, logprobs = jax.device_get((output.packed, output.logprobs))
    arrived = time.perf_counter()
    read, reports = [], {}
    for slot, job in enumerate(jobs):
      if job is None or job.is_finished:
        continue
      reports[slot] = report = types.StepReport.unpack(packed[slot])
      own = jax.tree.map(lambda x, slot=slot: x[slot], logprobs)
      read.append((job.handle, report, len(job.push(report, own))))
    seconds, self._last_arrival = arrived - self._last_arrival, arrived
    self.pipeline.observe(reports, None if math.isnan(seconds) else seconds)
    self._note('wait', start, arrived)
    self._note('read', arrived, time.perf_counter())
    return read

  def _admit(self) -> None:
    """Gives free rows to the requests that wait, first come, first served."""
    if self._waiting and not self.pipeline.capacity:
      self.prepare(self.max_context)
    while self._waiting and None in self._rows:
      slot, job = self._rows.index(None), self._waiting.popleft()
      self._rows[slot] = job
      # The last token of the prompt is the root of the first round.
      num_tokens = len(job.request.token_ids) - 1
      chunks = buckets.plan_prefill(num_tokens, self.pipeline.capacity)
      self._last_arrival = math.nan  # the next round takes longer
      self.pipeline.admit(slot, job.request, job.limit, chunks)
      job.end_prefill()

  def _make_job(
    self, request: Request, handle: Handle, max_speculative_tokens: int | None
  ) -> Job:
    limit = self.check(request)
    if (
      max_speculative_tokens is not None
      and max_speculative_tokens < self.max_draft_tokens
    ):
      raise errors.UserError(
        f'max_speculative_tokens={max_speculative_tokens} is not supported in '
        'this mode, where all requests share the sizes of a round; leave it out'
      )
    row = requests_lib.Row(
      handle.request_id,
      request,
      limit,
      self.model,
      self.max_draft_tokens,
      chains_by_model=self._chains_by_model,
    )
    return Job(row, handle)

  def check(self, request: Request) -> int:
    """Returns the length at which a request must end.

    Raises:
      UserError: it cannot be served.
    """
    return requests_lib.limit_of(request, self.model, self.max_context)

  def _queue(self, job: Job) -> None:
    self._waiting.append(job)

  def _drop(self, job: Job) -> None:
    if job in self._rows:
      self._stop(self._rows.index(job))
    else:
      self._waiting.remove(job)

  def _stop(self, slot: int) -> None:
    self.pipeline.stop(slot)
    self._rows[slot] = None

  def _note(self, name: str, start: float, end: float) -> None:
    if self._timeline is not None:
      self._timeline.host(name, start, end)
