"""What the evaluation of a draft says: acceptance, and the speed it predicts.

A round of a mode emits `acceptance length` tokens. It runs d draft forwards of
W leaves and one target forward of T tokens. Plain decoding emits one token in a
target forward of one token. So, with t for the seconds of a forward,

  speedup, serial = acceptance length * t_target(1)
                    / (t_target(T) + d * t_draft(W))
  speedup, async  = acceptance length * t_target(1)
                    / max(t_target(T), d * t_draft(W))

d is what was counted, restarts included. The prediction leaves out transfers
and the work on the tree itself. It takes the acceptance of serial mode for
both; trees that grow during the verification are accepted less often.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.measuring import benchmark_report
from experiments.output.benchmark_output import Record
from swiftspec_jax.requests import results

CHAIN_LENGTH = 4
TREE_SIZES = (8, 16)
CHAIN = f'chain{CHAIN_LENGTH}'
MODES = (CHAIN, *(f'tree{size}' for size in TREE_SIZES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
  """Measured seconds of a forward, by its number of tokens or leaves."""

  target: Mapping[int, float]
  draft: Mapping[int, float]
  width: int  # W of the trees


def summarize(records: Sequence[Record], times: StepTimes) -> dict[str, Any]:
  """Returns the figures of summary.json.

  Args:
    records: records of `MODES`; may be incomplete, and lack modes.
    times: step times with the tokens and leaves that `MODES` need.

  Returns:
    `num_prompts`, `chain_acceptance_length`, `chain_acceptance_per_position`
    (of the rounds that drafted a position, the share that accepted it),
    `tree_acceptance_length` of the largest tree and `_by_nodes`,
    `draft_forwards_per_round_by_mode`, `predicted_speedup` of the fastest mode
    and `_by_mode`, over all tasks and for each of the `tasks`;
    `draft_step_seconds` of a tree's leaves, `target_step_seconds` of the
    smallest tree's nodes, and both `_by_size`. What was not measured is None.
  """
  tasks = dict.fromkeys(record.task for record in records)
  return {
    **_figures(records, times),
    'target_step_seconds': times.target[TREE_SIZES[0]],
    'target_step_seconds_by_size': _by_size(times.target),
    'draft_step_seconds': times.draft[times.width],
    'draft_step_seconds_by_size': _by_size(times.draft),
    'tasks': {
      task: _figures([r for r in records if r.task == task], times)
      for task in tasks
    },
  }


def acceptance_per_position(records: Sequence[Record]) -> list[float]:
  """Returns for each position the share of the rounds that accepted it."""
  return [rate or 0.0 for rate in results.rate_per_position(records)]


def table(summary: Mapping[str, Any]) -> str:
  """Returns the summary as text for a terminal."""
  speedups = list(summary['predicted_speedup_by_mode'])
  numbers = [
    *(f'p{i}' for i in range(1, CHAIN_LENGTH + 1)),
    *MODES,
    *(f'x {mode}' for mode in speedups),
  ]
  tasks = summary['tasks'] if len(summary['tasks']) > 1 else {}
  rows = []
  for task, figures in [('all', summary), *tasks.items()]:
    values = [
      *(figures['chain_acceptance_per_position'] or [None] * CHAIN_LENGTH),
      figures['chain_acceptance_length'],
      *figures['tree_acceptance_length_by_nodes'].values(),
      *(figures['predicted_speedup_by_mode'][mode] for mode in speedups),
    ]
    row = dict(zip(numbers, values, strict=True))
    rows.append({'task': task, 'prompts': figures['num_prompts'], **row})
  columns = {name: (name,) for name in ('task', 'prompts')}
  columns |= {name: (name, '.2f') for name in numbers}
  return benchmark_report.table_of(rows, columns, num_names=1)


def describe_steps(times: StepTimes) -> str:
  """Returns the step times as lines of text."""
  return '\n'.join(
    f'{who} forward of {unit}: '
    + ', '.join(f'{n}: {s * 1e3:.1f} ms' for n, s in sorted(seconds.items()))
    for who, unit, seconds in (
      ('target', 'tokens', times.target),
      ('draft', 'leaves', times.draft),
    )
  )


def _figures(records: Sequence[Record], times: StepTimes) -> dict[str, Any]:
  by_mode = {mode: [r for r in records if r.mode == mode] for mode in MODES}
  lengths = {
    mode: results.total_acceptance_length(own) if own else None
    for mode, own in by_mode.items()
  }
  forwards = {mode: _forwards(mode, own) for mode, own in by_mode.items()}
  chain = by_mode[CHAIN]
  by_nodes = {str(size): lengths[f'tree{size}'] for size in TREE_SIZES}
  speedups = _speedups(lengths, forwards, times)
  measured = [speedup for speedup in speedups.values() if speedup is not None]
  return {
    'num_prompts': len({record.question_id for record in records}),
    'chain_acceptance_length': lengths[CHAIN],
    'chain_acceptance_per_position': (
      acceptance_per_position(chain) if chain else None
    ),
    'tree_acceptance_length': by_nodes[str(TREE_SIZES[-1])],
    'tree_acceptance_length_by_nodes': by_nodes,
    'draft_forwards_per_round_by_mode': forwards,
    'predicted_speedup': max(measured, default=None),
    'predicted_speedup_by_mode': speedups,
  }


def _forwards(mode: str, records: Sequence[Record]) -> float | None:
  """Returns d."""
  if not records:
    return None
  if mode == CHAIN:
    return float(CHAIN_LENGTH)
  num_rounds = sum(record.num_rounds for record in records)
  return sum(record.num_draft_forwards for record in records) / num_rounds


def _speedups(lengths, forwards, times) -> dict[str, float | None]:
  """Returns what the formulas above say."""
  sizes = {CHAIN: (CHAIN_LENGTH + 1, 1)}
  sizes |= {f'tree{size}': (size, times.width) for size in TREE_SIZES}
  serial, asynchronous = {}, {}
  for mode, (num_tokens, num_leaves) in sizes.items():
    plain = predicted = overlapped = None
    if lengths[mode] is not None:
      plain = lengths[mode] * times.target[1]
      target = times.target[num_tokens]
      draft = forwards[mode] * times.draft[num_leaves]
      predicted = plain / (target + draft)
      overlapped = plain / max(target, draft)
    serial[mode] = predicted
    if mode != CHAIN:
      asynchronous[f'{mode}_async'] = overlapped
  return serial | asynchronous


def _by_size(seconds: Mapping[int, float]) -> dict[str, float]:
  return {str(size): seconds[size] for size in sorted(seconds)}
