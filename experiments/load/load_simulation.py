"""The simulator against the engine: the same requests, measured costs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.load import load_report
from swiftspec_jax import simulator
from swiftspec_jax.engine.engine import StepRecord
from swiftspec_jax.policies.cost_model.measured import MeasuredCosts

# Latencies that differ by less are no ranking.
_LEAST_DIFFERENCE = 0.03


def step_error(costs: MeasuredCosts, record: StepRecord) -> float:
  """Returns by which share of its time a whole step was predicted wrongly."""
  predicted = simulator.step_seconds(
    costs,
    costs.key.buckets,
    record.draft_plan,
    record.step,
    prefills_draft=record.prefills_draft,
  )
  return abs(predicted / record.seconds - 1)


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
  longest = max(row['mean_num_speculative_tokens'] for row in rows)
  row = next(r for r in rows if r['mean_num_speculative_tokens'] == longest)
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
