"""Requests that arrive at an engine over time, real or virtual."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

import swiftspec_jax as ss
from swiftspec_jax import simulator, tree
from swiftspec_jax.engine.engine import Engine, StepRecord
from swiftspec_jax.policies import cost_model
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.requests import results
from swiftspec_jax.simulator.arrivals import Arrivals
from swiftspec_jax.simulator.load_metrics import LoadRecorder

_LONGEST_SLEEP = 0.05  # seconds


class RealTime:
  """The clock on the wall; 0 is when the first request can come."""

  def __init__(self):
    self._start = time.perf_counter()

  def now(self) -> float:
    """Returns the time in seconds."""
    return time.perf_counter() - self._start

  def time_step(self, record: StepRecord) -> tuple[float, float]:
    """Returns when the step that has just been run ended, and its seconds."""
    return record.time - self._start, record.seconds

  def wait(self, until: float) -> None:
    """Waits for a part of the time: Ctrl-C is not kept waiting."""
    time.sleep(min(max(until - self.now(), 0.0), _LONGEST_SLEEP))


class VirtualTime:
  """A clock for steps that take what costs say, as in the simulator."""

  def __init__(self, costs: cost_model.CostModel, buckets: StepBuckets):
    """Begins at 0; `buckets` are those of the engine."""
    self._costs = costs
    self._buckets = buckets
    self._now = 0.0

  def now(self) -> float:
    """Returns the time in seconds."""
    return self._now

  def time_step(self, record: StepRecord) -> tuple[float, float]:
    """Returns when the step that has just been run ended, and its seconds."""
    seconds = simulator.step_seconds(
      self._costs,
      self._buckets,
      record.draft_plan,
      record.step,
      prefills_draft=record.prefills_draft,
    )
    self._now += seconds
    return self._now, seconds

  def wait(self, until: float) -> None:
    """Is there at once."""
    self._now = until


def replay(
  engine: Engine,
  arrivals: Arrivals,
  requests: Sequence[ss.Request],
  clock: RealTime | VirtualTime,
  on_step: Callable[[StepRecord], None],
) -> LoadRecorder:
  """Serves requests as they arrive; returns what happened to them."""
  recorder = LoadRecorder(arrivals, engine.scheduler.config.buckets.max_length)
  first_id, num_submitted = None, 0
  while not recorder.is_finished.all():
    now = clock.now()
    while num_submitted < len(requests) and (
      arrivals.times[num_submitted] <= now
    ):
      handle = engine.submit(requests[num_submitted])
      first_id = handle.request_id if first_id is None else first_id
      num_submitted += 1
    record = engine.step()
    if record is None:
      clock.wait(arrivals.times[num_submitted])
      continue
    on_step(record)
    step = dataclasses.replace(
      record.step, request_ids=record.step.request_ids - first_id
    )
    recorder.note_step(
      record.draft_plan, step, record.num_accepted, *clock.time_step(record)
    )
    recorder.note_finished(record.ended - first_id)
  return recorder


def of_steps(records: Sequence[StepRecord]) -> dict[str, float | None]:
  """Returns columns that simulated steps do not have."""
  outcomes = np.sum([record.outcomes for record in records], axis=0)
  num_hits, num_late_hits, num_misses = (
    int(outcomes[i]) for i in (tree.HIT, tree.LATE_HIT, tree.MISS)
  )
  return {
    **results.verdict_rates(num_hits, num_late_hits, num_misses),
    'host_seconds_per_step': statistics.fmean(x.host_seconds for x in records),
  }
