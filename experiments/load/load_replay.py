"""Requests that arrive at an engine over time, and the simulator beside it.

Time is real or virtual; both serve the same requests.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import swiftspec_jax as ss
from experiments.load import load_report
from swiftspec_jax import simulator, tree
from swiftspec_jax.engine.engine import Engine, StepRecord
from swiftspec_jax.policies import cost_model
from swiftspec_jax.policies.cost_model.measured import MeasuredCosts
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.requests import results
from swiftspec_jax.simulator.arrivals import Arrivals
from swiftspec_jax.simulator.load_metrics import LoadRecorder

_LONGEST_SLEEP = 0.05  # seconds
# Latencies that differ by less are no ranking.
_LEAST_DIFFERENCE = 0.03


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
    seconds = _predict(self._costs, self._buckets, record)
    self._now += seconds
    return self._now, seconds

  def wait(self, until: float) -> None:
    """Is there at once."""
    self._now = until


def _predict(
  costs: cost_model.CostModel, buckets: StepBuckets, record: StepRecord
) -> float:
  """Returns the seconds of a whole step as costs say."""
  return simulator.step_seconds(
    costs,
    buckets,
    record.draft_plan,
    record.step,
    prefills_draft=record.prefills_draft,
  )


def step_error(costs: MeasuredCosts, record: StepRecord) -> float:
  """Returns by which share of its time a whole step was predicted wrongly."""
  predicted = _predict(costs, costs.key.buckets, record)
  return abs(predicted / record.seconds - 1)


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


def measured_acceptance(
  rows: Sequence[Mapping[str, Any]],
) -> tuple[np.ndarray, float]:
  """Returns what runs say about the drafts.

  Args:
    rows: rows of rows.jsonl.

  Returns:
    The probability f64[K] that a draft token is accepted if those before it
    are, and that there is a draft at all; of the policy that verified most.
  """
  row = max(rows, key=lambda row: row['mean_num_speculative_tokens'])
  rates = [rate or 0.0 for rate in row['acceptance_rate_per_position']]
  before = [1.0, *rates[:-1]]
  acceptance = [r / b if b else 0.0 for r, b in zip(rates, before, strict=True)]
  lengths = row['chosen_lengths']
  coverage = 1 - lengths[0] / max(sum(lengths), 1)
  return np.clip(acceptance, 0, 1), coverage


def compare(
  rows: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]
) -> str:
  """Returns a sentence on latencies and rankings of the same runs."""
  real, virtual = (
    {
      (row['request_rate'], row['policy']): row['mean_e2e_latency']
      for row in load_report.average(some)
    }
    for some in (rows, simulated)
  )
  ratios = [virtual[key] / real[key] for key in real]
  pairs = [
    (a, b)
    for a, b in itertools.combinations(real, 2)
    if a[0] == b[0] and abs(real[a] / real[b] - 1) > _LEAST_DIFFERENCE
  ]
  num_alike = sum(
    (real[a] < real[b]) == (virtual[a] < virtual[b]) for a, b in pairs
  )
  return (
    f'simulated over measured latency: {np.median(ratios):.2f} (median; '
    f'{min(ratios):.2f} to {max(ratios):.2f}); {num_alike} of {len(pairs)} '
    f'pairs of policies whose latencies differ by {_LEAST_DIFFERENCE:.0%} rank '
    'alike'
  )
