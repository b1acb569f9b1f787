"""What plans say: as lines, flags and tables, in words, and beside a paper."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs.deployment import Deployment, Published
from experiments.measuring import benchmark_report
from experiments.planning import plan_search, plan_validation
from experiments.planning.plan_search import GOALS, Plan
from swiftspec_jax.simulator.planning import rounds as rounds_lib

# SwiftSpec, figure 8: means of five pairs. The faster of two ways to decode
# (mode, and whether kernels are fused), the other one, the ratio of speeds.
_RATIOS = {
  'all over fused kernels alone': (('async', True), ('serial', True), 1.43),
  'async alone over neither': (('async', False), ('serial', False), 1.50),
  'all over async alone': (('async', True), ('async', False), 1.16),
  'fused kernels alone over neither': (
    ('serial', True),
    ('serial', False),
    1.21,
  ),
}
_WIDE = 'bfloat16'  # of matrices that are not quantized


def row(
  plan: Plan,
  deployment: Deployment,
  ratios: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Any]:
  """Returns a line of search.jsonl.

  Args:
    plan: plan of the line.
    deployment: deployment that it is of.
    ratios: published over predicted seconds of targets and of drafts, f[N] and
      f[M]; with them it is a line of rows.jsonl, and has an interval.
  """
  choice, tree = plan.choice, plan.recording.tree
  rounds, times = plan.recording.rounds, plan.price.times
  dtype, draft_dtype = (dtype or _WIDE for dtype in choice.weight_dtypes)
  values = {
    'plan': choice.name,
    'mode': choice.mode,
    'chips': choice.chips,
    'target_chips': choice.target_chips,
    'draft_chips': choice.draft_chips,
    'kernels': choice.kernels,
    'weight_dtype': dtype,
    'draft': choice.draft.name,
    'draft_weight_dtype': draft_dtype,
    'num_nodes': tree.num_nodes,
    'width': tree.num_leaves,
    'num_draft_steps': tree.num_draft_steps,
    'acceptance_length': rounds.acceptance_length,
    'target_step_seconds': times.target,
    'draft_step_seconds': times.draft,
    'measured': ' '.join(plan.price.measured),
    'tokens_per_second': plan.tokens_per_second,
    'slow_tokens_per_second': plan.slow_tokens_per_second,
  }
  if ratios is not None:
    sure = np.ones(1)
    low, high = rounds_lib.interval(
      rounds,
      times,
      *(
        sure if name in plan.price.measured else own
        for name, own in zip(('target', 'draft'), ratios, strict=True)
      ),
    )
    known = [p for p in deployment.published if is_of(plan, p)]
    values |= {
      'low': low,
      'high': high,
      'published': known[0].tokens_per_second if known else None,
    }
    values['parts'] = plan.parts
  return {**values, 'limit': max(plan.parts, key=plan.parts.get)}


def flags_of(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of flags that a row stands for, by name."""
  weight_dtype, draft_weight_dtype = (
    None if row[name] == _WIDE else row[name]
    for name in ('weight_dtype', 'draft_weight_dtype')
  )
  is_same = draft_weight_dtype == weight_dtype
  return {
    'mode': row['mode'],
    'weight_dtype': weight_dtype,
    'draft_weight_dtype': None if is_same else draft_weight_dtype or 'wide',
    'target_devices': row['target_chips'],
    'draft_devices': row['draft_chips'] if row['mode'] == 'async' else None,
    **{name: row[name] for name in ('num_nodes', 'width', 'num_draft_steps')},
  }


def is_of(plan: Plan, published: Published) -> bool:
  """Whether a published figure is of this mode and split, and fused."""
  return plan.choice.group == (published.mode, published.target_chips, True)


def compare(
  deployment: Deployment, found: Sequence[Plan]
) -> list[dict[str, Any]]:
  """Returns rows of validation.jsonl: speeds and ratios beside the paper's.

  Speeds with published step times say what the rounds alone are worth.

  Args:
    deployment: models and chips.
    found: plans with int4 weights, the first draft, and the kernels of the
      paper's programs.
  """
  rows = []
  for published in deployment.published:
    own = [plan for plan in found if is_of(plan, published)]
    speed = published.tokens_per_second
    predicted = {'': plan_search.best(own).tokens_per_second}
    if published.target_seconds and published.draft_seconds:
      times = rounds_lib.Times(
        target=published.target_seconds, draft=published.draft_seconds
      )
      predicted[', with the published step times'] = max(
        plan.recording.rounds.tokens_per_second(times) for plan in own
      )
    rows += [
      _row(published.source, f'{published.mode}{note}, tokens/s', value, speed)
      for note, value in predicted.items()
    ]
  speeds = {
    key: plan_search.best(
      [p for p in found if (p.choice.mode, p.choice.kernels) == key]
    ).tokens_per_second
    for *keys, _ in _RATIOS.values()
    for key in keys
  }
  for what, (faster, slower, ratio) in _RATIOS.items():
    rows.append(_row('figure 8', what, speeds[faster] / speeds[slower], ratio))
  ours = [p for p in found if p.choice.mode == 'async' and p.choice.kernels]
  first = plan_search.best(ours)
  theirs = plan_search.best(
    [p for p in ours if p.choice.target_chips == deployment.published_split]
  )
  what = (
    f'best split, here with {first.choice.target_chips} chips of the target, '
    f'over the published one with {theirs.choice.target_chips}'
  )
  ratio = first.tokens_per_second / theirs.tokens_per_second
  rows.append(_row('table 9', what, ratio, 1.0))
  return rows


def _row(source, *others) -> dict[str, Any]:
  return plan_validation.row(f'SwiftSpec, {source}', *others)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the plans as text for a terminal."""
  columns = {
    'mode': ('mode',),
    'chips': ('chips',),
    'kernels': lambda row: 'yes' if row['kernels'] else 'no',
    'target': lambda row: str(row['weight_dtype']),
    'draft': lambda row: f'{row["draft"]} {row["draft_weight_dtype"]}',
    'limit': ('limit',),
    'bs': ('num_nodes',),
    'd': ('num_draft_steps',),
    'tokens': ('acceptance_length', '.2f'),
    'target ms': ('target_step_seconds', '.2f', 1e3),
    'draft ms': ('draft_step_seconds', '.2f', 1e3),
    'tokens/s': ('tokens_per_second', '.0f'),
    'slow': ('slow_tokens_per_second', '.0f'),
    'interval': lambda row: f'{row["low"]:.0f} to {row["high"]:.0f}',
    'paper': ('published', '.0f'),
  }
  return benchmark_report.table_of(rows, columns, num_names=6)


def validation_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns predicted beside published figures, step times in milliseconds."""
  rows = [
    {
      **row,
      'scale': 1e3 if 'is_fitted' in row else 1,
      'left_out': row['left_out_error'] if row.get('is_fitted') else None,
    }
    for row in rows
  ]
  columns = {
    'source': ('source',),
    'what': ('what',),
    'predicted': lambda row: f'{row["scale"] * row["predicted"]:.2f}',
    'published': lambda row: f'{row["scale"] * row["published"]:.2f}',
    'error': ('error', '+.1%'),
    'left out': ('left_out', '+.1%'),
  }
  return benchmark_report.table_of(rows, columns, num_names=2)


def advice(
  summary: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str:
  """Returns what the best plan is, what holds it back, and what would help."""
  best, goal = summary['best'], summary['goal']
  lines = [
    f'best for {goal["of"]}: {best["plan"]}, '
    f'{best["tokens_per_second"]:.0f} tokens/s '
    f'({best["low"]:.0f} to {best["high"]:.0f}), '
    f'{best["slow_tokens_per_second"]:.0f} or more in 95 % of the requests'
  ]
  parts = sorted(best['parts'].items(), key=lambda part: -part[1])
  total = sum(best['parts'].values())
  shares = [f'{seconds / total:.0%} {what}' for what, seconds in parts]
  lines.append(f'its round of {1e3 * total:.2f} ms: {", ".join(shares)}')
  if (wanted := goal['tokens_per_second']) is not None:
    lines += _of_goal(wanted, GOALS[goal['of']], tables)
  lines.append('the best plan would have')
  lines += [
    f'  {speed:.0f} tokens/s with {change}'
    for change, speed in summary['what_if'].items()
  ]
  return '\n'.join(lines)


def sources(constants: Sequence[Mapping[str, Any]]) -> str:
  """Returns the numbers of a chip by their sources."""
  by_source: dict[str, list[str]] = {}
  for row in constants:
    number = f'{row["number"]} {row["value"]:.4g}'
    by_source.setdefault(row['source'], []).append(number)
  return '\n'.join(f'{k}: {", ".join(v)}' for k, v in by_source.items())


def _of_goal(wanted, score, tables) -> list[str]:
  """Returns which plans reach the goal, or what it would need."""
  above = [row for row in tables['rows'] if row[score] > wanted]
  names = [f'{row["plan"]} ({row[score]:.0f})' for row in above]
  lines = [f'above the goal of {wanted:g}: {"; ".join(names) or "none"}']
  if above and score == GOALS['throughput']:  # which the intervals are of
    sure = [row['plan'] for row in above if row['low'] > wanted]
    lines.append(f'with the whole interval: {"; ".join(sure) or "none"}')
  if tables['needs']:
    lines.append(f'to reach {wanted:g}, one of')
  for row in tables['needs']:
    needed, now = row['needed'], f'{row["now"]:.3g}'
    if needed is None:
      lines.append(f'  {row["what"]}: no value will do, it is {now}')
      continue
    line = f'  {row["what"]}: {needed:.3g} in place of {now}'
    if row['what'] == 'launch_seconds':
      line += f', or {1 - needed / row["now"]:.0%} fewer kernels'
    lines.append(line)
  return lines
