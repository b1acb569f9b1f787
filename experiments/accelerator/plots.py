"""Pictures of the report, one for each section that has something to draw."""

from collections.abc import Sequence

import numpy as np
from matplotlib import figure as figure_lib

from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from swiftspec_jax.cli import plots

_STATUS_COLORS = {
  rows_lib.OK: plots.GREEN,
  rows_lib.REFUSED: plots.GREY,
  rows_lib.DIFFERS: plots.RED,
  rows_lib.FAILED: plots.PINK,
  rows_lib.CRASHED: plots.ORANGE,
  rows_lib.TIMED_OUT: plots.YELLOW,
  rows_lib.NO_PACKAGE: plots.SKY,
}
_MOST_BARS = 40


def draw(section: str, rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Returns the picture of a section, None if there is none."""
  return _DRAWN[section](rows) if section in _DRAWN else None


def _draw_times(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Bars of seconds beside those of the reference."""
  found = [
    row
    for row in rows
    if row.seconds and row.reference_seconds
    if not row.name.endswith(' reference')
  ][:_MOST_BARS]
  if not found:
    return None
  figure, (axes,) = plots.make_figure(11, 1.2 + 0.32 * len(found))
  times = {
    'reference': [row.reference_seconds * 1e3 for row in found],
    'measured': [row.seconds * 1e3 for row in found],
  }
  colors = {'reference': plots.GREY, 'measured': plots.BLUE}
  plots.bars(axes, _names(found), times, colors, '', is_horizontal=True)
  for place, (reference, own) in enumerate(zip(*times.values(), strict=True)):
    axes.annotate(
      f'{reference / own:.2f}x',
      (max(own, reference), place),
      (4, 0),
      textcoords='offset points',
      va='center',
    )
  axes.set_xscale('log')
  axes.margins(x=0.15)
  axes.set_xlabel('milliseconds')
  plots.legend_below(axes)
  return figure


def _draw_shares(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Bars of the share of the bandwidth."""
  found = [row for row in rows if row.bandwidth_share][:_MOST_BARS]
  if not found:
    return None
  figure, (axes,) = plots.make_figure(11, 1.2 + 0.32 * len(found))
  plots.bars(
    axes,
    _names(found),
    {'share': [row.bandwidth_share for row in found]},
    {'share': plots.BLUE},
    '{:.0%}',
    is_horizontal=True,
  )
  axes.axvline(1, color=plots.ORANGE, linewidth=1)
  axes.margins(x=0.1)
  axes.set_xlabel('share of the bandwidth')
  return figure


def _draw_errors(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Bars of how many shapes of each kernel came out how."""
  names = list(dict.fromkeys(row.name for row in rows))
  statuses = list(dict.fromkeys(row.status for row in rows))
  if not names:
    return None
  figure, (axes,) = plots.make_figure(11, 1.2 + 0.32 * len(names))
  left = np.zeros(len(names))
  for status in sorted(statuses, key=lambda status: status != rows_lib.OK):
    counts = np.array(
      [
        sum(row.name == name and row.status == status for row in rows)
        for name in names
      ]
    )
    axes.barh(
      names, counts, 0.7, left, label=status, color=_STATUS_COLORS[status]
    )
    left += counts
  axes.invert_yaxis()
  axes.set_xlabel('shapes')
  axes.xaxis.get_major_locator().set_params(integer=True)
  plots.legend_below(axes, len(statuses))
  return figure


def _draw_engine(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Lines of a step's time by the rows of the engine."""
  steps = [row for row in rows if 'rows' in row.figures]
  if not steps:
    return None
  figure, (axes,) = plots.make_figure(7, 3.6)
  for length, color in zip(
    sorted({row.figures['draft_tokens'] for row in steps}),
    (plots.GREY, plots.BLUE, plots.ORANGE),
    strict=False,
  ):
    own = [row for row in steps if row.figures['draft_tokens'] == length]
    axes.plot(
      [row.figures['rows'] for row in own],
      [row.seconds * 1e3 for row in own],
      'o-',
      color=color,
      label=f'{length} draft tokens a row',
    )
  axes.set_xscale('log', base=2)
  counts = sorted({row.figures['rows'] for row in steps})
  axes.set_xticks(counts, map(str, counts))
  axes.set_ylim(bottom=0)
  axes.set_xlabel('rows')
  axes.set_ylabel('milliseconds of a step')
  axes.legend(frameon=False)
  return figure


def _names(rows: Sequence[Row]) -> list[str]:
  labels = [f'{row.name}  {row.shape}' for row in rows]
  return [label if len(label) < 75 else f'{label[:72]}...' for label in labels]


_DRAWN = {
  'first': _draw_errors,
  'correctness': _draw_errors,
  'kernels': _draw_times,
  'tiles': _draw_times,
  'small': _draw_times,
  'large': _draw_shares,
  'engine': _draw_engine,
}
