"""One HTML page of result folders that needs nothing else."""

import base64
import html
import io
import json
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib import figure as figure_lib

from experiments.output import result_folder
from experiments.output.result_folder import Folder
from experiments.output.run_comparison import Ratio

_INK, _BLUE, _GREY = '#7d8590', '#2f81c7', '#8c8c8c'  # on light and on dark
_MOST_BARS = 40
_MOST_ROWS = 1000
_MOST_COLUMNS = 24
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --paper: #fff;
  --soft: #64748b; --line: #e2e8f0; --head: #f1f5f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb;
  --paper: #0d1117; --soft: #94a3b8; --line: #30363d; --head: #161b22; } }
body { background: var(--paper); color: var(--ink); margin: 20px 28px;
  font: 14px/1.45 system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin-top: 32px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p, summary { color: var(--soft); max-width: 110ch; }
figure { margin: 8px 0; max-width: 100%; overflow-x: auto; }
figure img { background: #fff; max-width: 100%; border-radius: 6px; }
.scroll { overflow: auto; max-height: 75vh; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line);
  text-align: left; white-space: nowrap; }
th { background: var(--head); position: sticky; top: 0; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid #2f81c7; }
th[aria-sort=ascending] button::after { content: ' \\25b2'; }
th[aria-sort=descending] button::after { content: ' \\25bc'; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""
# A click, or a key, on the head of a column sorts by it.
_SCRIPT = """
for (const button of document.querySelectorAll('th button'))
  button.addEventListener('click', () => {
    const head = button.parentElement, body = head.closest('table').tBodies[0];
    const up = head.getAttribute('aria-sort') !== 'ascending';
    for (const other of head.parentElement.children)
      other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const value = row => row.cells[head.cellIndex].dataset.value;
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === '' || y === '') return (x === '') - (y === '');
      const difference = Number(x) - Number(y);
      const sign = Number.isNaN(difference) ? x.localeCompare(y) : difference;
      return up ? sign : -sign;
    };
    body.append(...[...body.rows].sort(order));
  });
"""


def render(
  folders: Sequence[Folder], ratios: Sequence[Ratio] | None = None
) -> str:
  """Returns the page.

  Args:
    folders: Result folders, in the order of the page.
    ratios: Comparison of the second folder with the first, if there is one.
  """
  parts = []
  if ratios is not None:
    parts += _comparison(folders[0], folders[1], ratios)
  for folder in folders:
    parts += _section(folder)
  return page('Results', parts)


def page(title: str, parts: Sequence[str]) -> str:
  """Returns a page.

  Args:
    title: Title, and first heading.
    parts: HTML of the content.
  """
  title = html.escape(title)
  return '\n'.join(
    [
      '<!DOCTYPE html>',
      '<html lang="en"><head><meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width">',
      f'<title>{title}</title><style>{_STYLE}</style></head><body>',
      f'<h1>{title}</h1>',
      *parts,
      f'<script>{_SCRIPT}</script></body></html>\n',
    ]
  )


def _comparison(
  first: Folder, second: Folder, ratios: Sequence[Ratio]
) -> list[str]:
  names = html.escape(f'{second.name} over {first.name}')
  if not ratios:
    return [f'<h2>{names}</h2><p>The runs have no work in common.</p>']
  rows = [
    {
      'what': ratio.group,
      'samples': ratio.num_samples,
      'speed ratio': ratio.ratio,
      'from (95 %)': ratio.low,
      'to': ratio.high,
    }
    for ratio in ratios
  ]
  return [
    f'<h2>{names}</h2>',
    '<p>Speed of the second run over that of the first, on what both have '
    'measured; above 1 the second is faster. Intervals are of 95 %, by the '
    'bootstrap over prompts, seeds or shapes. They do not know of machines '
    'that change their speed between runs.</p>',
    _picture(_draw_ratios(ratios), 'speed ratios'),
    table(rows),
  ]


def _section(folder: Folder) -> list[str]:
  parts = [f'<h2>{html.escape(folder.name)}</h2>']
  speeds = _speeds(folder)
  if 0 < len(speeds) <= _MOST_BARS:
    parts.append(_picture(_draw_speeds(speeds, folder.unit), folder.unit))
  for name, picture in folder.pictures.items():
    parts.append(image(name, picture))
  for name, rows in folder.tables.items():
    if rows:
      parts += [f'<h3>{html.escape(name)}</h3>', table(rows)]
  if folder.facts:
    facts = [{'name': k, 'value': v} for k, v in folder.facts.items()]
    parts.append(details('Provenance', facts))
  return parts


def image(name: str, picture: bytes) -> str:
  """Returns a PNG as part of the page."""
  data = base64.b64encode(picture).decode()
  return (
    f'<figure><img alt="{html.escape(name)}" '
    f'src="data:image/png;base64,{data}"></figure>'
  )


def details(name: str, rows: Sequence[result_folder.Row]) -> str:
  """Returns a table that a click on its name shows."""
  name = html.escape(name)
  return f'<details><summary>{name}</summary>{table(rows)}</details>'


def table(rows: Sequence[result_folder.Row]) -> str:
  """Returns a table whose columns can be sorted."""
  columns = list(dict.fromkeys(name for row in rows for name in row))
  left_out = []
  if len(columns) > _MOST_COLUMNS:
    left_out.append(f'{len(columns) - _MOST_COLUMNS} columns')
  if len(rows) > _MOST_ROWS:
    left_out.append(f'{len(rows) - _MOST_ROWS} rows')
  columns = columns[:_MOST_COLUMNS]
  head = ''.join(
    f'<th scope="col"><button>{html.escape(name)}</button></th>'
    for name in columns
  )
  body = '\n'.join(
    f'<tr>{"".join(_cell(row.get(name)) for name in columns)}</tr>'
    for row in rows[:_MOST_ROWS]
  )
  note = f'<p>Left out: {" and ".join(left_out)}.</p>' if left_out else ''
  return (
    f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
    f'<tbody>{body}</tbody></table></div>{note}'
  )


def _cell(value: Any) -> str:
  if value is None:
    return '<td data-value=""></td>'
  if isinstance(value, bool) or not isinstance(value, int | float):
    text = html.escape(str(value))
    return f'<td data-value="{text}">{text}</td>'
  shown = f'{value:,}' if isinstance(value, int) else f'{value:.4g}'
  return f'<td class="number" data-value="{json.dumps(value)}">{shown}</td>'


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


def _draw_speeds(speeds, unit) -> figure_lib.Figure:
  figure, axes = _bar_axes(len(speeds))
  bars = axes.barh(list(speeds), list(speeds.values()), 0.7, color=_BLUE)
  axes.bar_label(bars, [f'{v:.3g}' for v in speeds.values()], padding=3,
                 color=_INK)  # fmt: skip
  axes.invert_yaxis()
  axes.margins(x=0.1)
  axes.set_xlabel(unit)
  return figure


def _draw_ratios(ratios: Sequence[Ratio]) -> figure_lib.Figure:
  shown = ratios[:_MOST_BARS]
  figure, axes = _bar_axes(len(shown))
  for place, ratio in enumerate(shown):
    if ratio.low is not None:
      axes.plot([ratio.low, ratio.high], [place, place], color=_BLUE, lw=2)
    axes.plot(ratio.ratio, place, 'o', color=_BLUE)
  axes.axvline(1, color=_GREY, linewidth=1)
  axes.set_yticks(range(len(shown)), [ratio.group for ratio in shown])
  axes.set_ylim(len(shown) - 0.5, -0.5)
  axes.set_xlabel('speed ratio')
  return figure


def _bar_axes(num_bars: int):
  with mpl.rc_context(_ink()):
    figure = figure_lib.Figure(
      figsize=(9, 0.9 + 0.3 * num_bars), layout='constrained'
    )
    axes = figure.subplots()
  axes.spines[['top', 'right']].set_visible(False)
  return figure, axes


def _ink() -> dict[str, str]:
  names = ('text.color', 'axes.labelcolor', 'axes.edgecolor', 'xtick.color')
  return dict.fromkeys((*names, 'ytick.color'), _INK)


def _picture(figure: figure_lib.Figure, label: str) -> str:
  """Returns a figure as inline SVG."""
  output = io.StringIO()
  with mpl.rc_context({**_ink(), 'svg.fonttype': 'none'}):
    figure.savefig(output, format='svg', transparent=True)
  svg = output.getvalue()
  svg = svg[svg.index('<svg') :].replace(
    '<svg', f'<svg role="img" aria-label="{html.escape(label)}"', 1
  )
  return f'<figure>{svg}</figure>'
