"""The pictures of a load experiment."""

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as figure_lib
from matplotlib import ticker

from experiments.load import load_report

_GRAY, _BLACK = '#8c8c8c', '#000000'
# Safe for the colour-blind (Okabe and Ito).
_COLORS = ('#e69f00', '#56b4e9', '#009e73', '#cc79a7', '#d55e00', '#0072b2')
_LINES = {
  load_report.NO_SPECULATION: {'color': _GRAY, 'linestyle': '--'},
  load_report.GOODPUT: {'color': _BLACK, 'linewidth': 2.5, 'zorder': 3},
}


def draw_latency(rows: Sequence[Mapping[str, Any]], title: str) -> bytes | None:
  """Returns a PNG of latency and its parts over the rate; None without rows.

  Args:
    rows: averaged over the seeds.
    title: heading of the picture.
  """
  panels = (
    ('mean_e2e_latency', 'mean latency'),
    ('mean_ttft', 'mean time to first token'),
    ('mean_tpot', 'mean time per output token'),
  )
  rows = [row for row in rows if panels[0][0] in row]
  if not rows:
    return None
  figure = figure_lib.Figure(figsize=(12, 4.5), layout='constrained')
  for axes, (name, label) in zip(
    figure.subplots(1, len(panels)), panels, strict=True
  ):
    _draw_lines(axes, rows, name)
    axes.set_yscale('log')
    axes.yaxis.set_major_formatter(_seconds_formatter())
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.set_title(label, fontsize='medium')
  return _png(figure, title)


def draw_lengths(rows: Sequence[Mapping[str, Any]], title: str) -> bytes | None:
  """Returns a PNG of draft tokens and acceptance over the rate."""
  panels = (
    ('mean_num_speculative_tokens', 'draft tokens verified, a row and step'),
    ('acceptance_length', 'acceptance length, bonus included'),
  )
  if not rows:
    return None
  return _draw_panels(rows, panels, title)


def draw_promises(
  rows: Sequence[Mapping[str, Any]], title: str
) -> bytes | None:
  """Returns a PNG of kept promises over the rate; None without promises."""
  panels = (
    ('tpot_attainment', 'share of kept promises'),
    ('kept_throughput', 'tokens per second of requests that kept theirs'),
  )
  rows = [row for row in rows if panels[0][0] in row]
  if not rows:
    return None
  return _draw_panels(rows, panels, title)


def _draw_panels(rows, panels, title: str) -> bytes:
  """Returns a PNG with a panel for each pair of a figure and its label."""
  figure = figure_lib.Figure(figsize=(10, 4.5), layout='constrained')
  for axes, (name, label) in zip(
    figure.subplots(1, len(panels)), panels, strict=True
  ):
    _draw_lines(axes, rows, name)
    axes.set_title(label, fontsize='medium')
  return _png(figure, title)


def _draw_lines(axes, rows, name: str) -> None:
  styles = itertools.cycle(itertools.product(('-', '-.', ':'), _COLORS))
  for policy in dict.fromkeys(row['policy'] for row in rows):
    points = [
      (row['request_rate'], row[name])
      for row in rows
      if row['policy'] == policy and name in row
    ]
    style = _LINES.get(policy) or dict(
      zip(('linestyle', 'color'), next(styles), strict=True)
    )
    if points:
      axes.plot(
        *zip(*points, strict=True), label=policy, marker='o', ms=4, **style
      )
  axes.set_xlabel('requests per second')
  axes.spines[['top', 'right']].set_visible(False)


def _seconds_formatter() -> ticker.FuncFormatter:
  return ticker.FuncFormatter(
    lambda value, _: f'{value:g} s' if value >= 1 else f'{value * 1e3:g} ms'
  )


def _png(figure, title: str) -> bytes:
  handles, labels = figure.axes[0].get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc='outside lower center',
    ncols=min(len(labels), 6),
    frameon=False,
  )
  figure.suptitle(title, fontsize='medium')
  output = io.BytesIO()
  figure.savefig(output, format='png', dpi=150)
  return output.getvalue()
