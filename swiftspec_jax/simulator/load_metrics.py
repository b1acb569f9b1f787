"""Latency and throughput of many requests: raw counts first, ratios last.

TTFT is the time from arrival to the first token, TPOT the time between tokens
averaged over the rest of a request, ITL the gap between two outputs of a
request. With speculation an output can hold several tokens, so ITL is longer
than TPOT.
"""

import collections
import dataclasses
from typing import Any

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.simulator.arrivals import Arrivals

_PERCENTILES = {'median': 50, 'p90': 90, 'p99': 99}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyTarget:
  """What a request has to keep to count as served well, in seconds."""

  ttft: float
  tpot: float


class LoadRecorder:
  """Notes what happened to requests 0 to n - 1.

  Attributes:
    arrivals: f64[n] seconds.
    first: f64[n] time of the first token, NaN before.
    last: f64[n] time of the latest token, NaN before.
    num_output: i64[n] tokens so far.
    is_finished: bool[n].
    num_steps: number of steps of the engine.
    busy_seconds: seconds of all steps.
    num_query_tokens: tokens that the target was fed.
    num_computed_tokens: tokens that it has computed, padding too.
    shapes: number of steps by their rows and query tokens.
  """

  def __init__(self, arrivals: Arrivals, max_length: int):
    """Nothing has happened yet.

    Args:
      arrivals: arrivals of the requests.
      max_length: longest draft.
    """
    self.arrivals = arrivals.times
    self.first = np.full(len(arrivals), np.nan)
    self.last = np.full(len(arrivals), np.nan)
    self.num_output = np.zeros(len(arrivals), np.int64)
    self.is_finished = np.zeros(len(arrivals), bool)
    self.num_steps = 0
    self.num_probes = 0
    self.busy_seconds = 0.0
    self.num_query_tokens = 0
    self.num_computed_tokens = 0
    self.shapes: collections.Counter[tuple[int, int]] = collections.Counter()
    self._gaps: list[np.ndarray] = []
    # How often each length was verified, and how often at least that was
    # accepted.
    self._lengths = np.zeros(max_length + 1, np.int64)
    self._accepted = np.zeros(max_length + 1, np.int64)
    self._predicted = np.zeros(2)  # tokens, seconds
    self._realised = np.zeros(2)

  def note_step(
    self,
    policy_plan: policies.DraftPlan,
    step: StepPlan,
    num_accepted: np.ndarray,
    time: float,
    seconds: float,
  ) -> None:
    """Notes a step.

    Args:
      policy_plan: plan that the policy asked for.
      step: step that was run.
      num_accepted: i64[B] draft tokens that are part of the outputs, of rows
        that decode.
      time: time at the end of the step, in seconds.
      seconds: seconds that it took.
    """
    self.num_steps += 1
    self.num_probes += policy_plan.is_probe is not None
    self.busy_seconds += seconds
    self.num_query_tokens += step.shape[1]
    self.num_computed_tokens += step.num_computed_tokens
    self.shapes[step.shape] += 1
    decoding = slice(step.num_decoding)
    num_emitted = np.ones(len(step.slots), np.int64)
    num_emitted[decoding] += num_accepted
    num_emitted = num_emitted[step.is_sampled]
    request_ids = step.request_ids[step.is_sampled]
    previous = self.last[request_ids]
    is_first = np.isnan(previous)
    self.first[request_ids[is_first]] = time
    self._gaps.append((time - previous)[~is_first])
    self.last[request_ids] = time
    self.num_output[request_ids] += num_emitted
    size = len(self._lengths)
    self._lengths += np.bincount(step.lengths[decoding], minlength=size)
    self._accepted += np.bincount(num_accepted, minlength=size)
    if np.isfinite(policy_plan.expected_seconds):
      self._predicted += (
        policy_plan.expected_tokens,
        policy_plan.expected_seconds,
      )
      self._realised += num_accepted.sum() + step.num_decoding, seconds

  def note_finished(self, request_ids: np.ndarray) -> None:
    """Notes that requests have ended.

    Raises:
      ValueError: one had ended before.
    """
    if self.is_finished[request_ids].any():
      raise ValueError(f'ended twice, among requests {request_ids}')
    self.is_finished[request_ids] = True

  def summarize(self, target: LatencyTarget) -> dict[str, Any]:
    """Returns the figures of the requests that have finished.

    Times are in seconds; figures without data are None.
    """
    done = self.is_finished
    e2e = (self.last - self.arrivals)[done]
    ttft = (self.first - self.arrivals)[done]
    has_gaps = done & (self.num_output > 1)
    tpot = np.zeros(len(done))
    tpot[has_gaps] = (self.last - self.first)[has_gaps] / (
      self.num_output[has_gaps] - 1
    )
    num_rounds = int(self._lengths.sum())
    num_accepted = int((self._accepted * np.arange(len(self._accepted))).sum())
    num_verified = int((self._lengths * np.arange(len(self._lengths))).sum())
    num_padding = self.num_computed_tokens - self.num_query_tokens
    span = float(self.last[done].max() - self.arrivals[0]) if done.any() else 0
    is_kept = (ttft <= target.ttft) & (tpot[done] <= target.tpot)
    figures = {
      'num_requests': int(done.sum()),
      'mean_e2e_latency': _mean(e2e),
      'p99_e2e_latency': _percentile(e2e, 99),
      'mean_ttft': _mean(ttft),
      'mean_tpot': _mean(tpot[has_gaps]),
      'throughput': _ratio(int(self.num_output[done].sum()), span),
      'acceptance_length': 1 + num_accepted / max(num_rounds, 1),
      'mean_num_speculative_tokens': num_verified / max(num_rounds, 1),
      'slo_attainment': _mean(is_kept),
    }
    itl = np.concatenate([*self._gaps, np.zeros(0)])
    figures['mean_itl'] = _mean(itl)
    for name, values in (
      ('e2e_latency', e2e),
      ('ttft', ttft),
      ('tpot', tpot[has_gaps]),
      ('itl', itl),
    ):
      for prefix, percent in _PERCENTILES.items():
        figures[f'{prefix}_{name}'] = _percentile(values, percent)
    return figures | {
      'acceptance_rate_per_position': self._rate_per_position(),
      'chosen_lengths': self._lengths.tolist(),
      'predicted_goodput': _ratio(*self._predicted),
      'realised_goodput': _ratio(*self._realised),
      'num_steps': self.num_steps,
      'num_probes': self.num_probes,
      'busy_fraction': _ratio(self.busy_seconds, span),
      'padded_share': _ratio(num_padding, self.num_computed_tokens),
    }

  def _rate_per_position(self) -> list[float | None]:
    """Accepted at a position, of the drafts that had it verified."""
    accepted, verified = (
      counts[::-1].cumsum()[::-1][1:].tolist()
      for counts in (self._accepted, self._lengths)
    )
    return [_ratio(a, v) for a, v in zip(accepted, verified, strict=True)]


def _mean(values: np.ndarray) -> float | None:
  return float(values.mean()) if len(values) else None


def _percentile(values: np.ndarray, percent: int) -> float | None:
  return float(np.percentile(values, percent)) if len(values) else None


def _ratio(value: float, total: float) -> float | None:
  return float(value / total) if total else None
