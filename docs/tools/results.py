"""Writes the pages of docs/results from the result files beside them.

  python -m docs.tools.results

A result file NAME.json has a `title`, an `intro` and `measurements`. Each of
them has a `title`, its `command`, `machine` and `date`, the `commit` that
recorded it, and a table of texts: `columns` and `rows`. A `note` says more. The
page NAME.md says the same for readers.
"""

import json
import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program

DIRECTORY = pathlib.Path(__file__).parents[2] / 'docs' / 'results'
_FIELDS = ('title', 'command', 'machine', 'date', 'commit', 'columns', 'rows')


def main() -> None:
  """Writes all pages."""
  for path in sorted(DIRECTORY.glob('*.json')):
    output_files.write(path.with_suffix('.md'), render(path).encode())


def render(path: pathlib.Path) -> str:
  """Returns the page of a result file.

  Raises:
    UserError: a measurement lacks a field, or a row a cell.
  """
  values = json.loads(path.read_text())
  parts = [
    f'<!-- Written by docs.tools.results from {path.name}. -->',
    f'# {values["title"]}',
    values['intro'],
  ]
  for measurement in values['measurements']:
    _check(measurement, path)
    parts += _section(measurement)
  return '\n\n'.join(parts) + '\n'


def _check(measurement: Mapping[str, Any], path: pathlib.Path) -> None:
  title = measurement.get('title')
  for field in _FIELDS:
    if not measurement.get(field):
      raise errors.UserError(f'{path}: {title!r} has no {field}')
  for row in measurement['rows']:
    if len(row) != len(measurement['columns']):
      raise errors.UserError(
        f'{path}: {title!r} has {len(measurement["columns"])} columns, but '
        f'this row has {len(row)} cells: {row}'
      )


def _section(measurement: Mapping[str, Any]) -> list[str]:
  commands = '\n'.join(map(_wrap, measurement['command'].split('; ')))
  lines = [measurement['columns'], ['---'] * len(measurement['columns'])]
  table = '\n'.join(
    f'| {" | ".join(cells)} |' for cells in [*lines, *measurement['rows']]
  )
  where = (
    f'{measurement["machine"]}; {measurement["date"]}, commit '
    f'{measurement["commit"]}.'
  )
  note = measurement.get('note', '')
  return [
    f'## {measurement["title"]}',
    table,
    f'{where} {note}'.strip(),
    commands,
  ]


def _wrap(command: str) -> str:
  """Returns a command as code, in lines that a shell takes."""
  lines = textwrap.wrap(
    command, 76, break_long_words=False, break_on_hyphens=False
  )
  return '    ' + ' \\\n      '.join(lines)


if __name__ == '__main__':
  program.run(main)
