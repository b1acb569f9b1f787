"""One HTML page of result folders that needs nothing else."""

import base64
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
import markupsafe
import matplotlib as mpl

from experiments.output import result_folder
from experiments.output.result_folder import Folder, Row
from swiftspec_jax.cli import plots

_INK, _BLUE = '#7d8590', '#2f81c7'  # on light and on dark
_MOST_BARS = 40
_MOST_ROWS = 1000
_MOST_COLUMNS = 24
TEMPLATES = jinja2.Environment(
  loader=jinja2.PackageLoader('experiments', 'output'),
  autoescape=True,
  lstrip_blocks=True,
  trim_blocks=True,
)
_SHELL = TEMPLATES.get_template('page.html')
_INTERVALS = (
  'Speed of the second run over that of the first, on what both have measured; '
  'above 1 the second is faster. Intervals are of 95 %, by the bootstrap over '
  'prompts, seeds or shapes. They do not know of machines that change their '
  'speed between runs.'
)


class Number(NamedTuple):
  """A number with a form of its own: columns are sorted by its value."""

  value: float
  text: str


def render(
  folders: Sequence[Folder], ratios: Sequence[Row] | None = None
) -> str:
  """Returns the page.

  Args:
    folders: Result folders, in the order of the page.
    ratios: Rows of `run_comparison.compare` for the first two folders, if they
      are compared.
  """
  parts = []
  if ratios is not None:
    parts += _comparison(folders[0], folders[1], ratios)
  for folder in folders:
    parts += _section(folder)
  return page('Results', parts)


def page(
  title: str, parts: Sequence[markupsafe.Markup], style: str = ''
) -> str:
  """Returns a page; it is well-formed XML, too.

  Args:
    title: Title, and first heading.
    parts: HTML of the content.
    style: CSS besides that of all pages.
  """
  style = markupsafe.Markup(style)
  return _SHELL.render(title=title, parts=parts, style=style)


def element(name: str, text: str) -> markupsafe.Markup:
  """Returns an element that has nothing but text."""
  return markupsafe.Markup(f'<{name}>{{}}</{name}>').format(text)


def _comparison(
  first: Folder, second: Folder, ratios: Sequence[Row]
) -> list[markupsafe.Markup]:
  heading = element('h2', f'{second.name} over {first.name}')
  if not ratios:
    return [heading, element('p', 'The runs have no work in common.')]
  return [
    heading,
    element('p', _INTERVALS),
    _picture(_draw_ratios, ratios[:_MOST_BARS], 'speed ratio'),
    table(ratios),
  ]


def _section(folder: Folder) -> list[markupsafe.Markup]:
  parts = [element('h2', folder.name)]
  speeds = _speeds(folder)
  if 0 < len(speeds) <= _MOST_BARS:
    parts.append(_picture(_draw_speeds, speeds, folder.unit))
  parts += [image(*picture) for picture in folder.pictures.items()]
  for name, rows in folder.tables.items():
    if rows:
      parts += [element('h3', name), table(rows)]
  if folder.facts:
    parts.append(details('Provenance', facts(folder.facts)))
  return parts


def facts(values: Row) -> list[Row]:
  """Returns the rows of a table of names and values."""
  return [{'name': name, 'value': value} for name, value in values.items()]


def image(name: str, picture: bytes) -> markupsafe.Markup:
  """Returns a PNG as part of the page."""
  data = base64.b64encode(picture).decode()
  return markupsafe.Markup(
    '<figure><img alt="{}" src="data:image/png;base64,{}" /></figure>'
  ).format(name, data)


def details(name: str, rows: Sequence[Row]) -> markupsafe.Markup:
  """Returns a table that a click on its name shows."""
  summary = element('summary', name)
  return markupsafe.Markup('<details>{}{}</details>').format(
    summary, table(rows)
  )


def table(rows: Sequence[Row]) -> markupsafe.Markup:
  """Returns a table whose columns can be sorted."""
  columns = list(dict.fromkeys(name for row in rows for name in row))
  left_out = []
  if len(columns) > _MOST_COLUMNS:
    left_out.append(f'{len(columns) - _MOST_COLUMNS} columns')
  if len(rows) > _MOST_ROWS:
    left_out.append(f'{len(rows) - _MOST_ROWS} rows')
  columns = columns[:_MOST_COLUMNS]
  cells = [[_cell(row.get(c)) for c in columns] for row in rows[:_MOST_ROWS]]
  return _SHELL.module.table(columns, cells, ' and '.join(left_out))


def _cell(value: Any) -> tuple[Any, str]:
  """Returns what a column is sorted by, and what it shows."""
  if value is None:
    return '', ''
  if isinstance(value, Number):
    return value
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value), str(value)
  return value, f'{value:,}' if isinstance(value, int) else f'{value:.4g}'


def _speeds(folder: Folder) -> dict[str, float]:
  """Returns tokens a second, or mean seconds, of each group."""
  groups: dict[str, list[result_folder.Sample]] = {}
  for sample in folder.samples:
    groups.setdefault(sample.group, []).append(sample)
  speeds = {
    group: sum(s.amount for s in own) / sum(s.seconds for s in own)
    for group, own in groups.items()
  }
  if folder.unit == result_folder.TOKENS:
    return speeds
  return {group: 1 / speed for group, speed in speeds.items()}


def _draw_speeds(axes, speeds: dict[str, float]) -> None:
  bars = axes.barh(list(speeds), list(speeds.values()), 0.7, color=_BLUE)
  axes.bar_label(bars, [f'{v:.3g}' for v in speeds.values()], padding=3)
  axes.invert_yaxis()
  axes.margins(x=0.1)


def _draw_ratios(axes, ratios: Sequence[Row]) -> None:
  for place, ratio in enumerate(ratios):
    interval = ratio['from (95 %)'], ratio['to']
    if None not in interval:
      axes.plot(interval, [place, place], color=_BLUE, lw=2)
    axes.plot(ratio['speed ratio'], place, 'o', color=_BLUE)
  axes.axvline(1, color=plots.GREY, linewidth=1)
  axes.set_yticks(range(len(ratios)), [ratio['what'] for ratio in ratios])
  axes.set_ylim(len(ratios) - 0.5, -0.5)


def _picture(draw, values, label: str) -> markupsafe.Markup:
  """Returns what `draw` does to axes with a line for each value, as SVG."""
  names = ('text.color', 'axes.labelcolor', 'axes.edgecolor', 'xtick.color')
  ink = dict.fromkeys((*names, 'ytick.color'), _INK)
  output = io.StringIO()
  with mpl.rc_context({**ink, 'svg.fonttype': 'none'}):
    figure, (axes,) = plots.make_figure(9, 0.9 + 0.3 * len(values))
    draw(axes, values)
    axes.set_xlabel(label)
    figure.savefig(output, format='svg', transparent=True)
  svg = output.getvalue()
  opening = markupsafe.Markup('<figure><svg role="img" aria-label="{}"')
  drawing = markupsafe.Markup(svg[svg.index('<svg') + len('<svg') :])
  return opening.format(label) + drawing + markupsafe.Markup('</figure>')
