"""The picture of a benchmark: speed of each mode on each task."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.measuring.benchmark_report import BASELINE
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
  groups = groups_of([t for f in summary.values() for t in f['tasks']])
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
    plots.bars(axes, groups, values_of(shown, groups, key), colors, form)
    axes.margins(y=0.12)
  speedup.axhline(1, color=colors.get(BASELINE, 'black'), linewidth=1, zorder=1)
  speedup.set_ylabel(f'speedup over\n{BASELINE}')
  speed.set_ylabel('tokens per second')
  plots.legend_below(speed, num_columns=len(summary))
  return plots.png(figure, title)


def groups_of(tasks: Sequence[str]) -> list[str]:
  """Returns the groups of bars: a task once each, and all of them first."""
  tasks = list(dict.fromkeys(tasks))
  return ['all tasks', *tasks] if len(tasks) > 1 else tasks


def values_of(
  summary: Mapping[str, dict[str, Any]], groups: Sequence[str], key: str
) -> dict[str, list[float | None]]:
  """Returns a figure of each mode for each of the groups."""
  return {
    mode: [(figures['tasks'].get(group) or figures)[key] for group in groups]
    for mode, figures in summary.items()
  }
