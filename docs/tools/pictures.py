"""Draws the pictures of the README from result files.

  python -m docs.tools.pictures

writes docs/images/NAME-light.svg and NAME-dark.svg: `round`, the timeline of
asynchronous rounds, and `speed`, how fast a real pair is beside llama.cpp.
"""

import io
import json
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import figure as figure_lib

from docs.tools import results
from experiments.pictures import timeline_plot
from swiftspec_jax.cli import output_files, plots, program
from swiftspec_jax.runtime import timeline as timeline_lib

_IMAGES = results.DIRECTORY.parent / 'images'
_INK = {'light': '#1f2937', 'dark': '#e5e7eb'}
_PAIR = 'Four kinds of requests, beside llama.cpp'
_COLORS = {
  'plain': plots.GREEN,
  'prompt lookup': plots.BLUE,
  'auto': plots.SKY,
  'llama.cpp, prompt lookup': plots.GREY,
  'llama.cpp, draft': plots.ORANGE,
}


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
  """Draws the speed of a real pair on each task, beside llama.cpp."""
  found = _read('decoding.json')['measurements']
  measurement = next(m for m in found if m['title'] == _PAIR)
  columns = measurement['columns']
  tasks = columns[columns.index('all') : columns.index('first token')]
  rows = {
    row[0]: [float(row[columns.index(task)]) for task in tasks]
    for row in measurement['rows']
  }
  ratios = {
    name: np.divide(rows[name], rows['llama.cpp']).tolist() for name in _COLORS
  }
  figure, (axes,) = plots.make_figure(11, 3.4)
  plots.bars(axes, tasks, ratios, _COLORS)
  axes.axhline(1, color=mpl.rcParams['text.color'], linewidth=0.8, zorder=3)
  axes.set_title('tokens a second, llama.cpp = 1', fontsize='medium')
  axes.legend(frameon=False, fontsize='small', ncols=3, loc='upper left')
  axes.margins(y=0.25)
  return figure


def _read(name: str) -> dict[str, Any]:
  return json.loads((results.DIRECTORY / name).read_text())


if __name__ == '__main__':
  program.run(main)
