"""The report as one HTML page that needs nothing else."""

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import markupsafe
from matplotlib import figure as figure_lib

from experiments.accelerator import rows as rows_lib
from experiments.accelerator import sections
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Section
from experiments.output import report_page
from swiftspec_jax.cli import output_files, plots

PAGE = 'report.html'
_BAD = (
  rows_lib.DIFFERS,
  rows_lib.FAILED,
  rows_lib.CRASHED,
  rows_lib.TIMED_OUT,
)
_MOST_BARS = 40
_STYLE = f"""
figure img {{ max-width: min(100%, 11in); }}
td {{ white-space: normal; vertical-align: top; }}
td.number, td:first-child {{ white-space: nowrap; }}
td:last-child {{ color: var(--soft); min-width: 30ch; }}
td[data-value="{rows_lib.OK}"] {{ color: var(--good); }}
{', '.join(f'td[data-value="{status}"]' for status in _BAD)} {{
  color: var(--bad); font-weight: 600; }}
"""


def write(directory: pathlib.Path, rows: Sequence[Row]) -> pathlib.Path:
  """Makes or replaces the page of a report; returns its path."""
  path = directory / PAGE
  output_files.write(path, render(rows).encode())
  return path


def render(rows: Sequence[Row]) -> str:
  """Returns the page."""
  devices = dict.fromkeys(row.device for row in rows if row.device)
  parts = [
    report_page.element(
      'p',
      f'{", ".join(devices) or "nothing measured yet"}. '
      'docs/how_to/accelerators.md says how to read it.',
    )
  ]
  for section in sections.SECTIONS:
    own = [row for row in rows if row.section == section.name]
    parts += _section(section, own)
  return report_page.page('Accelerator report', parts, _STYLE)


def _section(section: Section, rows: Sequence[Row]) -> list[markupsafe.Markup]:
  counts = collections.Counter(row.status for row in rows)
  summary = ', '.join(f'{n} {status}' for status, n in counts.items())
  seconds = sum(row.job_seconds for row in rows)
  summary = f'{summary}; {seconds:.0f} s' if rows else 'not measured yet'
  note = markupsafe.Markup('<p>{} <b>{}.</b></p>').format(section.note, summary)
  parts = [report_page.element('h2', section.title), note]
  if not rows:
    return parts
  if figure := _draw(rows):
    parts.append(report_page.image(section.title, plots.png(figure)))
  return [*parts, report_page.table(list(map(_table_row, rows)))]


def _draw(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Returns bars of seconds beside those of the reference; None without."""
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
  labels = [f'{row.name}  {row.shape}' for row in found]
  names = [x if len(x) < 75 else f'{x[:72]}...' for x in labels]
  plots.bars(axes, names, times, colors, '', is_horizontal=True)
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


def _table_row(row: Row) -> dict[str, Any]:
  figures = '; '.join(
    f'{name} {_figure(name, value)}'
    for name, value in row.figures.items()
    if value is not None and not isinstance(value, list)
  )
  speedup = None
  if row.seconds and row.reference_seconds:
    speedup = row.reference_seconds / row.seconds
  return {
    'name': row.name,
    'shape': row.shape,
    'status': row.status,
    'time': _time_cell(row.seconds),
    'reference': _time_cell(row.reference_seconds),
    'speedup': _number(speedup, '.2f'),
    'bandwidth': _number(row.bandwidth_share, '.0%'),
    'max error': _number(row.max_error, '.2g'),
    'figures': f'{row.reason} {figures}'.strip(),
  }


def _number(value: float | None, form: str) -> report_page.Number | None:
  return None if value is None else report_page.Number(value, f'{value:{form}}')


def _time_cell(seconds: float | None) -> report_page.Number | None:
  return seconds and report_page.Number(seconds, _time(seconds))


def _time(seconds: float) -> str:
  """Returns seconds in the unit that suits them."""
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
