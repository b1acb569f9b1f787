"""Draws the pictures of the README from result files.

  python -m docs.tools.pictures

writes docs/images/NAME-light.svg and NAME-dark.svg: `round`, the timeline of
asynchronous rounds, and `speed`, what speculation gives by task and by mode.
"""

import io
import json
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib import figure as figure_lib

from docs.tools import results
from experiments.pictures import timeline_plot
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax.cli import output_files, plots, program

_IMAGES = results.DIRECTORY.parent / 'images'
_INK = {'light': '#1f2937', 'dark': '#e5e7eb'}
_DRAFT_COLORS = (plots.GREY, plots.ORANGE, plots.BLUE)  # a chain, two trees
_MODE_COLORS = {
  'autoregressive': plots.GREY,
  'prompt_lookup': plots.ORANGE,
  'serial': plots.BLUE,
  'auto': plots.GREEN,
  'transformers (torch)': plots.GREY,
}
_LABELS = {'autoregressive': 'plain decoding', 'serial': 'draft model, trees'}


def main() -> None:
  """Draws all pictures in both themes."""
  for name, make in {'round': draw_round, 'speed': draw_speed}.items():
    for theme in _INK:
      path = _IMAGES / f'{name}-{theme}.svg'
      output_files.write(path, as_svg(make, theme))


def as_svg(make: Callable[[], figure_lib.Figure], theme: str) -> bytes:
  """Returns the figure as SVG, in the ink of a `light` or `dark` page."""
  ink = _INK[theme]
  parts = ('text.color', 'axes.labelcolor', 'axes.edgecolor')
  settings = dict.fromkeys((*parts, 'xtick.color', 'ytick.color'), ink)
  # Texts stay texts, and equal figures give equal files.
  settings |= {'svg.fonttype': 'none', 'svg.hashsalt': 'swiftspec_jax'}
  output = io.BytesIO()
  with mpl.rc_context(settings):
    make().savefig(
      output, format='svg', transparent=True, metadata={'Date': None}
    )
  return output.getvalue()


def draw_round() -> figure_lib.Figure:
  """Draws the timeline of recorded rounds."""
  values = _read('timelines/async.json')
  spans = []
  for track, name, start, end in values['spans']:
    span = timeline_lib.Span(track, name, 0, start / 1e3)
    span.start, span.end = start / 1e3, end / 1e3
    spans.append(span)
  return timeline_plot.make_figure(spans, num_rounds=3, skip=0)


def draw_speed() -> figure_lib.Figure:
  """Draws tokens a round by task, and speedups by mode with their range."""
  figure, (left, right) = plots.make_figure(11, 3.6, 2, width_ratios=(3, 2))
  _draw_tasks(left, _measurement('drafts', 'The built-in draft by task'))
  runs = (
    ('float32', _measurement('decoding', 'Prompt lookup and transformers')),
    ('float32', _measurement('decoding', 'Auto mode, float32')),
    ('bfloat16', _measurement('decoding', 'Trees of the built-in draft')),
  )
  _draw_modes(right, runs)
  for axes in (left, right):
    axes.axhline(1, color=mpl.rcParams['text.color'], linewidth=0.8, zorder=3)
    axes.tick_params(axis='x', length=0)
  return figure


def _draw_tasks(axes, measurement) -> None:
  """Draws a group of bars for each task."""
  tasks, *values = zip(*measurement['rows'], strict=True)
  names = measurement['columns'][1:]
  plots.bars(
    axes,
    [task.replace(' ', '\n', 1) for task in tasks],
    {n: list(map(float, v)) for n, v in zip(names, values, strict=True)},
    dict(zip(names, _DRAFT_COLORS, strict=True)),
  )
  axes.tick_params(axis='x', labelsize='small')
  axes.set_title('tokens a target step, plain decoding = 1', fontsize='medium')
  axes.legend(frameon=False, fontsize='small', ncols=3, loc='upper left')
  axes.margins(y=0.18)


def _draw_modes(axes, runs) -> None:
  """Draws a group of bars for each run; a line spans the tasks."""
  place, ticks = 0.0, []
  for dtype, measurement in runs:
    first = place
    rows = [
      dict(zip(measurement['columns'], row, strict=True))
      for row in measurement['rows']
    ]
    rows = [row for row in rows if row.get('dtype', dtype) == dtype]
    for row in rows:
      if row['mode'] == 'autoregressive':
        continue
      speedup = float(row['speedup'])
      axes.bar(place, speedup, 0.8, color=_MODE_COLORS[row['mode']])
      if row['lowest task']:
        ends = [
          float(row[f'{n} task'].split()[-1]) for n in ('lowest', 'highest')
        ]
        axes.plot([place, place], ends, color=mpl.rcParams['text.color'], lw=1)
      ticks.append((place, row['mode']))
      axes.annotate(f'{speedup:.2f}', (place, 0.05), ha='center', color='white')
      place += 1
    axes.text(
      (first + place - 1) / 2, 1.95, dtype, ha='center', fontsize='small'
    )
    place += 0.6
  labels = [_LABELS.get(name, name.replace('_', ' ')) for _, name in ticks]
  axes.set_xticks([p for p, _ in ticks], labels, rotation=35, ha='right',
                  rotation_mode='anchor', fontsize='small')  # fmt: skip
  axes.set_ylim(0, 2.1)
  axes.set_title('speedup on 2 CPU cores, plain = 1', fontsize='medium')


def _read(name: str) -> dict[str, Any]:
  return json.loads((results.DIRECTORY / name).read_text())


def _measurement(name: str, title: str) -> dict[str, Any]:
  """Returns a measurement of a result file by its title."""
  found = _read(f'{name}.json')['measurements']
  return next(m for m in found if m['title'] == title)


if __name__ == '__main__':
  program.run(main)
