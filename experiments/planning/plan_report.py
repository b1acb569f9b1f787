"""What a plan says: beside published figures, as a table, as a picture."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as figure_lib

from configs.deployment import Deployment
from experiments.measuring import benchmark_report
from experiments.planning import plan_search
from experiments.planning.plan_search import Plan
from swiftspec_jax.planning.rounds import Times

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
_COLORS = {True: '#0072b2', False: '#8c8c8c'}  # by kernels


def compare(
  deployment: Deployment, found: Sequence[Plan]
) -> list[dict[str, Any]]:
  """Returns rows of validation.jsonl: speeds and ratios beside the paper's.

  Speeds with published step times say what the rounds alone are worth.

  Args:
    deployment: models and chips.
    found: plans with the kernels of the paper's programs.
  """
  rows = []
  for published in deployment.published:
    own = [plan for plan in found if plan_search.is_of(plan, published)]
    speed = published.tokens_per_second
    predicted = {'': plan_search.best(own).tokens_per_second}
    if published.target_seconds and published.draft_seconds:
      times = Times(
        target=published.target_seconds, draft=published.draft_seconds
      )
      predicted[', with the published step times'] = max(
        plan.recording.rounds.tokens_per_second(times) for plan in own
      )
    rows += [
      _row(published.source, f'{published.mode}{note}, tokens/s', value, speed)
      for note, value in predicted.items()
    ]
  if not deployment.published:
    return rows
  int4 = [plan for plan in found if plan.weight_dtype == 'int4']
  speeds = {
    key: plan_search.best(
      [p for p in int4 if (p.recording.mode, p.kernels) == key]
    ).tokens_per_second
    for *keys, _ in _RATIOS.values()
    for key in keys
  }
  for what, (faster, slower, ratio) in _RATIOS.items():
    rows.append(_row('figure 8', what, speeds[faster] / speeds[slower], ratio))
  ours = [p for p in int4 if p.recording.mode == 'async' and p.kernels]
  first = plan_search.best(ours)
  theirs = plan_search.best(
    [p for p in ours if p.target_chips == deployment.published_split]
  )
  what = (
    f'best split, here with {first.target_chips} chips of the target, over the '
    f'published one with {theirs.target_chips}'
  )
  ratio = first.tokens_per_second / theirs.tokens_per_second
  rows.append(_row('table 9', what, ratio, 1.0))
  return rows


def _row(source, what, predicted, published) -> dict[str, Any]:
  return {
    'source': f'SwiftSpec, {source}',
    'what': what,
    'predicted': predicted,
    'published': published,
    'error': predicted / published - 1,
  }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the plans as text for a terminal, times in milliseconds."""
  cells = [
    (
      'weights', 'mode', 'chips', 'kernels', 'limit', 'bs', 'd', 'tokens',
      'target', 'draft', 'tokens/s', 'interval', 'paper',
    )
  ]  # fmt: skip
  for row in rows:
    chips = f'{row["target_chips"]}'
    if row['mode'] == 'async':
      chips += f'+{row["draft_chips"]}'
    cells.append(
      (
        row['weight_dtype'],
        row['mode'],
        chips,
        'yes' if row['kernels'] else 'no',
        row['limit'],
        str(row['num_nodes']),
        str(row['num_draft_steps']),
        f'{row["acceptance_length"]:.2f}',
        f'{1e3 * row["target_step_seconds"]:.2f}',
        f'{1e3 * row["draft_step_seconds"]:.2f}',
        f'{row["tokens_per_second"]:.0f}',
        f'{row["low"]:.0f} to {row["high"]:.0f}',
        '-' if row['published'] is None else f'{row["published"]:.0f}',
      )
    )
  return benchmark_report.aligned(cells, num_names=5)


def validation_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns predicted beside published figures, step times in milliseconds."""
  cells = [('source', 'what', 'predicted', 'published', 'error', 'left out')]
  for row in rows:
    scale = 1e3 if 'is_fitted' in row else 1
    left_out = row['left_out_error'] if row.get('is_fitted') else None
    cells.append(
      (
        row['source'],
        row['what'],
        f'{scale * row["predicted"]:.2f}',
        f'{scale * row["published"]:.2f}',
        f'{row["error"]:+.1%}',
        '-' if left_out is None else f'{left_out:+.1%}',
      )
    )
  return benchmark_report.aligned(cells, num_names=2)


def draw(rows: Sequence[Mapping[str, Any]], deployment: Deployment) -> bytes:
  """Returns a PNG of the speeds with intervals, and of published ones."""
  figure = figure_lib.Figure(
    figsize=(9, 1.2 + 0.24 * len(rows)), layout='constrained'
  )
  axes = figure.subplots()
  for place, row in enumerate(rows):
    color = _COLORS[row['kernels']]
    axes.plot([row['low'], row['high']], [place] * 2, color=color)
    axes.plot(row['tokens_per_second'], place, 'o', color=color)
    if row['published'] is not None:
      axes.plot(row['published'], place, 'D', color='#e69f00')
  if deployment.goal is not None:
    axes.axvline(deployment.goal, color='#e69f00', linestyle='--')
  axes.set_yticks(
    range(len(rows)),
    [
      f'{row["weight_dtype"]} {row["mode"]} '
      f'{row["target_chips"]}/{row["draft_chips"]}'
      for row in rows
    ],
  )
  axes.invert_yaxis()
  axes.set_xlim(left=0)
  axes.set_xlabel(
    'tokens a second; blue: with kernels; diamond: published; dashed: goal'
  )
  axes.set_title(deployment.name)
  axes.grid(alpha=0.3)
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=110)
  return buffer.getvalue()
