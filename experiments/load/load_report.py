"""What a load experiment says: latency by policy and request rate."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.measuring import benchmark_report
from swiftspec_jax.cli.flags import policy_names

# Of the paper: average request latency, the best of its settings.
_PAPER_SPEEDUP = 3.2
_BEST_FIXED = 'the best fixed length'  # no speculation included


def average(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns a row for each policy and rate: means over the seeds.

  Figures that a seed does not have are left out.
  """
  groups: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
  for row in rows:
    groups.setdefault((row['request_rate'], row['policy']), []).append(row)
  return [
    {
      'policy': policy,
      'request_rate': rate,
      **{
        name: statistics.fmean(values)
        for name in group[0]
        if (values := [row[name] for row in group if _is_number(row[name])])
        and name not in ('policy', 'request_rate', 'seed')
      },
    }
    for (rate, policy), group in sorted(groups.items(), key=lambda g: g[0][0])
  ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns averaged rows as text, times in milliseconds."""
  columns = {
    'rate': ('request_rate', 'g'),
    'policy': ('policy',),
    'latency': ('mean_e2e_latency', '.1f', 1e3),
    'p99': ('p99_e2e_latency', '.1f', 1e3),
    'TTFT': ('mean_ttft', '.1f', 1e3),
    'TPOT': ('mean_tpot', '.1f', 1e3),
    'tokens/s': ('throughput', '.0f'),
    'acc. length': ('acceptance_length', '.2f'),
    'drafted': ('mean_num_speculative_tokens', '.2f'),
    'SLO': ('slo_attainment', '.2f'),
  }
  return benchmark_report.table_of(rows, columns, num_names=2)


def compare(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns sentences on how policies compare in averaged rows."""
  latencies = _latencies(rows)
  names = dict.fromkeys(n for p in latencies.values() for n in p)
  none, goodput = policy_names.NO_SPECULATION, policy_names.GOODPUT
  rivals = {_BEST_FIXED: _BEST_FIXED, 'no speculation': none}
  lines = []
  for name in names:
    if not policy_names.is_fixed(name):
      if name not in (none, goodput):
        rivals[name] = name
      continue
    slower = [
      rate for ratio, rate in _ratios(latencies, name, none) if ratio > 1
    ]
    if slower:
      lines.append(
        f'{name} is slower than no speculation from {min(slower):g} requests/s'
      )
  for label, rival in rivals.items():
    for ratio, rate in _ratios(latencies, goodput, rival)[-1:]:
      lines.append(
        f'latency of goodput over that of {label}: at most {ratio:.2f} (at '
        f'{rate:g} requests/s)'
      )
  for ratio, rate in _ratios(latencies, none, goodput)[-1:]:
    lines.append(
      f'latency of no speculation over that of goodput: up to {ratio:.2f} (at '
      f'{rate:g} requests/s; the paper reports up to {_PAPER_SPEEDUP})'
    )
  return lines


def _latencies(rows) -> dict[float, dict[str, float]]:
  """Returns latencies by rate and policy, that of the best length added."""
  found: dict[float, dict[str, float]] = {}
  for row in rows:
    if 'mean_e2e_latency' not in row:
      continue
    name, seconds = row['policy'], row['mean_e2e_latency']
    by_policy = found.setdefault(row['request_rate'], {})
    by_policy[name] = seconds
    if name == policy_names.NO_SPECULATION or policy_names.is_fixed(name):
      best = by_policy.get(_BEST_FIXED, seconds)
      by_policy[_BEST_FIXED] = min(best, seconds)
  return found


def _ratios(latencies, own, rival) -> list[tuple[float, float]]:
  """Returns ascending ratios of two latencies with the rates of both."""
  return sorted(
    (policies[own] / policies[rival], rate)
    for rate, policies in latencies.items()
    if policies.get(own) and policies.get(rival)
  )


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float)
