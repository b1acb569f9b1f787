"""Pictures of the report, one for each section that has something to draw."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from matplotlib import figure as figure_lib

from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row

_GREY, _BLUE, _ORANGE = '#8c8c8c', '#0072b2', '#e69f00'
_STATUS_COLORS = {
  rows_lib.OK: '#009e73',
  rows_lib.REFUSED: _GREY,
  rows_lib.DIFFERS: '#d55e00',
  rows_lib.FAILED: '#cc79a7',
  rows_lib.CRASHED: _ORANGE,
  rows_lib.TIMED_OUT: '#f0e442',
  rows_lib.NO_PACKAGE: '#56b4e9',
}
_MOST_BARS = 40


def draw(section: str, rows: Sequence[Row]) -> str | None:
  """Returns a picture as the source of an image, None if there is none."""
  if section not in _DRAWN:
    return None
  figure = _DRAWN[section](rows)
  if figure is None:
    return None
  output = io.BytesIO()
  figure.savefig(output, format='svg')
  data = base64.b64encode(output.getvalue()).decode()
  return f'data:image/svg+xml;base64,{data}'


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
  figure, axes = _bar_axes(len(found))
  places = np.arange(len(found))
  for i, (label, color) in enumerate(
    (('reference', _GREY), ('measured', _BLUE))
  ):
    values = [(row.reference_seconds, row.seconds)[i] * 1e3 for row in found]
    axes.barh(places + 0.2 - 0.4 * i, values, 0.38, label=label, color=color)
  labels = [f'{r.reference_seconds / r.seconds:.2f}x' for r in found]
  for place, row, label in zip(places, found, labels, strict=True):
    longest = max(row.seconds, row.reference_seconds) * 1e3
    axes.annotate(
      label, (longest, place), (4, 0), textcoords='offset points', va='center'
    )
  _name(axes, places, found)
  axes.set_xscale('log')
  axes.margins(x=0.15)
  axes.set_xlabel('milliseconds')
  figure.legend(loc='outside lower center', ncols=2, frameon=False)
  return figure


def _draw_shares(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Bars of the share of the bandwidth."""
  found = [row for row in rows if row.bandwidth_share][:_MOST_BARS]
  if not found:
    return None
  figure, axes = _bar_axes(len(found))
  places = np.arange(len(found))
  bars = axes.barh(
    places, [row.bandwidth_share for row in found], 0.7, color=_BLUE
  )
  labels = [f'{row.bandwidth_share:.0%}' for row in found]
  axes.bar_label(bars, labels, padding=3)
  axes.axvline(1, color=_ORANGE, linewidth=1)
  axes.margins(x=0.1)
  _name(axes, places, found)
  axes.set_xlabel('share of the bandwidth')
  return figure


def _draw_errors(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Bars of how many shapes of each kernel came out how."""
  names = list(dict.fromkeys(row.name for row in rows))
  statuses = list(dict.fromkeys(row.status for row in rows))
  if not names:
    return None
  figure, axes = _bar_axes(len(names))
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
  figure.legend(loc='outside lower center', ncols=len(statuses), frameon=False)
  return figure


def _draw_engine(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Lines of a step's time by the rows of the engine."""
  steps = [row for row in rows if 'rows' in row.figures]
  if not steps:
    return None
  figure = figure_lib.Figure(figsize=(7, 3.6), layout='constrained')
  axes = figure.subplots()
  for length, color in zip(
    sorted({row.figures['draft_tokens'] for row in steps}),
    (_GREY, _BLUE, _ORANGE),
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
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(frameon=False)
  return figure


def _draw_training(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """A line of the loss of each call."""
  trained = [row for row in rows if row.figures.get('losses')]
  if not trained:
    return None
  figure = figure_lib.Figure(figsize=(7, 3.2), layout='constrained')
  axes = figure.subplots()
  for row in trained:
    losses = row.figures['losses']
    steps = np.linspace(1, row.figures['num_steps'], len(losses))
    axes.plot(steps, losses, label=row.shape)
  axes.set_xlabel('step')
  axes.set_ylabel('loss')
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(frameon=False)
  return figure


def _bar_axes(num_bars: int):
  figure = figure_lib.Figure(
    figsize=(11, 1.2 + 0.32 * num_bars), layout='constrained'
  )
  axes = figure.subplots()
  axes.spines[['top', 'right']].set_visible(False)
  return figure, axes


def _name(axes, places, rows: Sequence[Row]) -> None:
  """Writes names and shapes beside horizontal bars, the first on top."""
  labels = [f'{row.name}  {row.shape}' for row in rows]
  short = [label if len(label) < 75 else f'{label[:72]}...' for label in labels]
  axes.set_yticks(places, short, fontsize='small')
  axes.invert_yaxis()


_DRAWN = {
  'first': _draw_errors,
  'correctness': _draw_errors,
  'kernels': _draw_times,
  'tiles': _draw_times,
  'small': _draw_times,
  'large': _draw_shares,
  'engine': _draw_engine,
  'training': _draw_training,
}
