"""The picture of a benchmark: speed of each mode on each task."""

import io
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import figure as figure_lib

from experiments.measuring.benchmark_report import BASELINE

_BLUE, _ORANGE, _GREEN = '#0072b2', '#e69f00', '#009e73'
_COLORS = (
  '#8c8c8c', _BLUE, _ORANGE, _GREEN, '#cc79a7', '#56b4e9', '#d55e00',
  '#f0e442', '#000000', '#332288', '#44aa99', '#882255', '#999933', '#88ccee',
)  # fmt: skip


def draw(summary: Mapping[str, dict[str, Any]], title: str) -> bytes:
  """Returns a PNG of speedup and tokens per second.

  Args:
    summary: result of `benchmark_report.summarize`; not empty.
    title: title, with the machine that it was measured on.
  """
  tasks = list(dict.fromkeys(t for f in summary.values() for t in f['tasks']))
  groups = ['all tasks', *tasks] if len(tasks) > 1 else tasks
  width = 2 + len(groups) * (0.4 + 0.3 * len(summary))
  figure = figure_lib.Figure(figsize=(max(width, 8), 6.4), layout='constrained')
  speedup, speed = figure.subplots(2, sharex=True)
  colors = dict(zip(summary, itertools.cycle(_COLORS), strict=False))
  compared = [mode for mode in summary if mode != BASELINE] or list(summary)
  bars(speedup, summary, compared, groups, 'speedup', '{:.2f}', colors)
  speedup.axhline(1, color=colors.get(BASELINE, 'black'), linewidth=1, zorder=1)
  speedup.set_ylabel(f'speedup over\n{BASELINE}')
  bars(
    speed, summary, list(summary), groups, 'tokens_per_second', '{:.0f}', colors
  )
  speed.set_ylabel('tokens per second')
  speed.set_xticks(range(len(groups)), groups)
  handles, labels = speed.get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc='outside lower center',
    ncols=len(labels),
    frameon=False,
  )
  figure.suptitle(title, fontsize='medium')
  output = io.BytesIO()
  figure.savefig(output, format='png', dpi=150)
  return output.getvalue()


def bars(axes, summary, modes, groups, key, form, colors):
  """Draws a group of bars for each task, one bar for each of `modes`.

  Args:
    axes: axes of matplotlib.
    summary: result of `benchmark_report.summarize`.
    modes: the order of the bars in a group.
    groups: tasks; what is none stands for all of them.
    key: key of the figure that is drawn.
    form: form of the labels.
    colors: color of each mode.
  """
  width = 0.8 / len(modes)
  for i, mode in enumerate(modes):
    figures = summary[mode]
    values = [(figures['tasks'].get(group) or figures)[key] for group in groups]
    heights = [0 if value is None else value for value in values]
    places = np.arange(len(groups)) + (i - (len(modes) - 1) / 2) * width
    bars = axes.bar(
      places, heights, 0.92 * width, label=mode, color=colors[mode], zorder=2
    )
    labels = ['-' if value is None else form.format(value) for value in values]
    axes.bar_label(bars, labels, fontsize='x-small', padding=1)
  axes.margins(y=0.12)
  axes.spines[['top', 'right']].set_visible(False)
  axes.tick_params(axis='x', length=0)
