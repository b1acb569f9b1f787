"""The report as one HTML page that needs nothing else."""

import collections
import html
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.accelerator import plots, sections
from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Section
from experiments.output import benchmark_output

PAGE = 'report.html'
_STYLE = """
body { background: #fff; color: #1f2937; margin: 20px 28px; line-height: 1.45;
  font: 14px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 28px 0 2px; }
p { margin: 4px 0 10px; max-width: 110ch; color: #64748b; }
img { display: block; max-width: 100%; margin: 8px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 10px; border-bottom: 1px solid #e2e8f0;
  text-align: left; vertical-align: top; }
th { background: #f8fafc; font-weight: 600; }
td.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
td.ok { color: #15803d; }
td.bad { color: #b91c1c; font-weight: 600; }
td.none { color: #64748b; }
td.figures { color: #475569; overflow-wrap: anywhere; min-width: 30ch; }
"""
_COLUMNS = (
  'name',
  'shape',
  'status',
  'time',
  'reference',
  'speedup',
  'bandwidth',
  'max error',
  'figures',
)
_BAD = (
  rows_lib.DIFFERS,
  rows_lib.FAILED,
  rows_lib.CRASHED,
  rows_lib.TIMED_OUT,
)


def write(directory: pathlib.Path, rows: Sequence[Row]) -> pathlib.Path:
  """Makes or replaces the page of a report; returns its path."""
  path = directory / PAGE
  benchmark_output.write(path, render(rows).encode())
  return path


def render(rows: Sequence[Row]) -> str:
  """Returns the page; it is well-formed XML, too."""
  devices = dict.fromkeys(row.device for row in rows if row.device)
  lines = [
    '<!DOCTYPE html>',
    '<html lang="en"><head><meta charset="utf-8" />',
    '<meta name="viewport" content="width=device-width" />',
    f'<title>Accelerator report</title><style>{_STYLE}</style></head><body>',
    '<h1>Accelerator report</h1>',
    f'<p>{html.escape(", ".join(devices) or "nothing measured yet")}. '
    'docs/how_to/accelerators.md says how to read it.</p>',
  ]
  for section in sections.SECTIONS:
    own = [row for row in rows if row.section == section.name]
    lines += _section(section, own)
  return '\n'.join([*lines, '</body></html>'])


def _section(section: Section, rows: Sequence[Row]) -> list[str]:
  counts = collections.Counter(row.status for row in rows)
  summary = ', '.join(f'{n} {status}' for status, n in counts.items())
  seconds = sum(row.job_seconds for row in rows)
  summary = f'{summary}; {seconds:.0f} s' if rows else 'not measured yet'
  lines = [
    f'<h2>{html.escape(section.title)}</h2>',
    f'<p>{html.escape(section.note)} <b>{html.escape(summary)}.</b></p>',
  ]
  if not rows:
    return lines
  picture = plots.draw(section.name, rows)
  if picture is not None:
    title = html.escape(section.title)
    lines.append(f'<img alt="{title}" src="{picture}" />')
  head = ''.join(f'<th>{column}</th>' for column in _COLUMNS)
  body = '\n'.join(map(_table_row, rows))
  return [
    *lines,
    f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>',
  ]


def _table_row(row: Row) -> str:
  speedup = None
  if row.seconds and row.reference_seconds:
    speedup = row.reference_seconds / row.seconds
  kind = 'ok' if row.status == rows_lib.OK else 'none'
  kind = 'bad' if row.status in _BAD else kind
  figures = '; '.join(
    f'{name} {_figure(name, value)}'
    for name, value in row.figures.items()
    if value is not None and not isinstance(value, list)
  )
  cells = (
    ('', row.name),
    ('', row.shape),
    (kind, row.status),
    ('number', _time(row.seconds)),
    ('number', _time(row.reference_seconds)),
    ('number', '' if speedup is None else f'{speedup:.2f}'),
    (
      'number',
      '' if row.bandwidth_share is None else f'{row.bandwidth_share:.0%}',
    ),
    ('number', '' if row.max_error is None else f'{row.max_error:.2g}'),
    ('figures', f'{row.reason} {figures}'.strip()),
  )
  tds = ''.join(
    f'<td class="{css}">{html.escape(text)}</td>' for css, text in cells
  )
  return f'<tr>{tds}</tr>'


def _time(seconds: float | None) -> str:
  """Returns seconds in the unit that suits them."""
  if seconds is None:
    return ''
  for unit, factor in (('s', 1), ('ms', 1e3)):
    if seconds * factor >= 1:
      return f'{seconds * factor:.3g} {unit}'
  return f'{seconds * 1e6:.3g} us'


def _figure(name: str, value: Any) -> str:
  """Returns a number in few digits, anything else as it is."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if name.endswith('seconds'):
    return _time(value)
  return f'{value:,.0f}' if 1e3 <= abs(value) < 1e6 else f'{value:.3g}'
