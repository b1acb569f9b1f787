"""Pictures of speed and of acceptance on each task."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.measuring import benchmark_report, evaluation_report
from experiments.measuring.benchmark_report import BASELINE
from experiments.output.benchmark_output import Record
from swiftspec_jax.cli import plots

_COLORS = (
  plots.GREY, plots.BLUE, plots.ORANGE, plots.GREEN, plots.PINK, plots.SKY,
  plots.RED, plots.YELLOW, 'black', '#332288', '#44aa99', '#882255', '#999933',
  '#88ccee',
)  # fmt: skip


def draw(summary: Mapping[str, dict[str, Any]], title: str) -> bytes:
  """Returns a PNG of speedup and tokens per second.

  Args:
    summary: result of `benchmark_report.summarize`; not empty.
    title: title, with the machine that it was measured on.
  """
  groups = _groups_of([t for f in summary.values() for t in f['tasks']])
  width = 2 + len(groups) * (0.4 + 0.3 * len(summary))
  figure, (speedup, speed) = plots.make_figure(
    max(width, 8), 6.4, num_rows=2, sharex=True
  )
  colors = dict(zip(summary, itertools.cycle(_COLORS), strict=False))
  compared = {m: f for m, f in summary.items() if m != BASELINE} or summary
  for axes, shown, key, form in (
    (speedup, compared, 'speedup', '{:.2f}'),
    (speed, summary, 'tokens_per_second', '{:.0f}'),
  ):
    plots.bars(axes, groups, _values_of(shown, groups, key), colors, form)
    axes.margins(y=0.12)
  speedup.axhline(1, color=colors.get(BASELINE, 'black'), linewidth=1, zorder=1)
  speedup.set_ylabel(f'speedup over\n{BASELINE}')
  speed.set_ylabel('tokens per second')
  plots.legend_below(speed, num_columns=len(summary))
  return plots.png(figure, title)


def draw_acceptance(records: Sequence[Record], title: str) -> bytes:
  """Returns a PNG of acceptance by position in the chain and by task.

  Args:
    records: records of `evaluation_report.MODES`; not empty.
    title: title, with the machine that it was measured on.
  """
  summary = benchmark_report.summarize(
    records, evaluation_report.MODES, is_greedy=False
  )
  groups = _groups_of([record.task for record in records])
  shades = plots.GREY, plots.ORANGE, plots.BLUE
  colors = dict(zip(evaluation_report.MODES, shades, strict=True))
  width = max(9, 4 + 1.2 * len(groups))
  figure, (positions, lengths) = plots.make_figure(
    width, 4.6, 2, width_ratios=[4, width - 4]
  )
  _draw_positions(positions, records, groups)
  values = _values_of(summary, groups, 'acceptance_length')
  plots.bars(lengths, groups, values, colors)
  lengths.set_xticks(range(len(groups)), groups, rotation=20, ha='right')
  lengths.set_ylabel('tokens a round, bonus included')
  lengths.legend(frameon=False, ncols=len(summary), loc='upper right')
  lengths.margins(y=0.25)
  return plots.png(figure, title)


def _draw_positions(axes, records, groups):
  """Draws the acceptance at each position of the chain, a line a task."""
  chain = [r for r in records if r.mode == evaluation_report.CHAIN]
  places = range(1, evaluation_report.CHAIN_LENGTH + 1)
  # All tasks come last, as their line lies on top.
  for group in sorted(groups, key='all tasks'.__eq__):
    is_all = group == 'all tasks'
    if own := [r for r in chain if is_all or r.task == group]:
      axes.plot(
        places,
        evaluation_report.acceptance_per_position(own),
        'o-',
        label=group,
        color='black' if is_all else None,
        linewidth=2.5 if is_all else 1,
      )
  axes.set_xticks(places)
  axes.set_ylim(0, 1)
  axes.set_xlabel('position in the chain')
  axes.set_ylabel('share of the rounds that accept it')
  axes.legend(frameon=False, fontsize='small')


def _groups_of(tasks: Sequence[str]) -> list[str]:
  """Returns the groups of bars: a task once each, and all of them first."""
  tasks = list(dict.fromkeys(tasks))
  return ['all tasks', *tasks] if len(tasks) > 1 else tasks


def _values_of(
  summary: Mapping[str, dict[str, Any]], groups: Sequence[str], key: str
) -> dict[str, list[float | None]]:
  """Returns a figure of each mode for each of the groups."""
  return {
    mode: [(figures['tasks'].get(group) or figures)[key] for group in groups]
    for mode, figures in summary.items()
  }
