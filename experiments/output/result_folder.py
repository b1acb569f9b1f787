"""Reads what any program left in its folder of results."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from swiftspec_jax import errors

TOKENS, SECONDS = 'tokens/s', 'seconds'
_PROVENANCE = ('provenance.json', 'settings.json')

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
  """One timed piece of work, which another run may have done, too.

  Attributes:
    group: The thing that is compared, such as a mode or a kernel.
    key: A name that no other sample of the group has.
    amount: Work done; tokens, or 1.
    seconds: The time that it took.
  """

  group: str
  key: str
  amount: float
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
  """The content of a folder.

  Attributes:
    name: The folder's path as it was given.
    facts: Provenance and settings by name.
    tables: Rows of flat values, by the name of their file.
    pictures: PNG files by name.
    samples: Timed work that can be compared with another run.
    unit: `TOKENS` or `SECONDS`, the unit of a group's speed.
  """

  name: str
  facts: Row
  tables: Mapping[str, Sequence[Row]]
  pictures: Mapping[str, bytes]
  samples: Sequence[Sample]
  unit: str


def read(path: pathlib.Path) -> Folder:
  """Reads a folder.

  Raises:
    UserError: the folder has no results, or a file cannot be read.
  """
  lines = {p.name: _lines(p) for p in sorted(path.glob('*.jsonl'))}
  values = {p.name: _json(p) for p in sorted(path.glob('*.json'))}
  summary = values.pop('summary.json', {})
  facts = dict(summary.pop('provenance', {}))
  for name in _PROVENANCE:
    facts |= values.pop(name, {})
  tables = {**_summary_tables(summary), **lines}
  for name, other in values.items():
    facts |= other.pop('provenance', {})
    if scalars := flat(other):
      tables[name] = [{'figure': k, 'value': v} for k, v in scalars.items()]
  if not any(tables.values()):
    raise errors.UserError(
      f'{path} has no results; name a folder that a program wrote with '
      '--output_dir'
    )
  records = [r for r in lines.get('results.jsonl', ()) if 'decode_seconds' in r]
  return Folder(
    name=str(path),
    facts=flat(facts),
    tables={n: [flat(row) for row in rows] for n, rows in tables.items()},
    pictures={p.stem: p.read_bytes() for p in sorted(path.glob('*.png'))},
    samples=_of_records(records) or _of_rows(lines.get('rows.jsonl', ())),
    unit=TOKENS if records else SECONDS,
  )


def flat(values: Row, prefix: str = '') -> dict[str, Any]:
  """Returns nested values by joined names; lists of objects are left out."""
  found = {}
  for name, value in values.items():
    if isinstance(value, Mapping):
      found |= flat(value, f'{prefix}{name}.')
    elif not isinstance(value, list):
      found[f'{prefix}{name}'] = value
    elif value and all(isinstance(part, str) for part in value):
      found[f'{prefix}{name}'] = ' '.join(value)
  return found


def _summary_tables(summary: Row) -> dict[str, list[Row]]:
  """Returns a row for each mode, or one for each figure."""
  rows = [{'figure': k, 'value': v} for k, v in flat(summary).items()]
  if 'modes' in summary:
    rows = [
      {'mode': mode, **{k: v for k, v in figures.items() if k != 'tasks'}}
      for mode, figures in summary['modes'].items()
    ]
  return {'summary.json': rows} if rows else {}


def _of_records(records: Sequence[Row]) -> list[Sample]:
  """Returns a sample for each prompt of a benchmark."""
  return [
    Sample(
      group=record['mode'],
      key=f'{record["question_id"]} {record["repeat"]}',
      amount=record.get('decoded_tokens', record['new_tokens']),
      seconds=record['decode_seconds'],
    )
    for record in records
    if record['decode_seconds']
  ]


def _of_rows(rows: Sequence[Row]) -> list[Sample]:
  """Returns a sample for each run of a load, and for each kernel's shape."""
  found = []
  for row in rows:
    if 'policy' in row:
      group = f'{row["policy"]} at {row["request_rate"]:g}/s'
      key, seconds = f'{row.get("seed", 0)}', row.get('mean_e2e_latency')
    elif 'kernel' in row:
      times = row['seconds']
      group, key = row['kernel'], row['shape']
      seconds = times.get(row['implementation'] or 'reference')
    elif 'section' in row:
      group, key = row['name'], row['shape']
      seconds = row['seconds'] if row['status'] == 'ok' else None
    else:
      continue
    if seconds:
      found.append(Sample(group=group, key=key, amount=1, seconds=seconds))
  return found


def _lines(path: pathlib.Path) -> list[Row]:
  """Returns the complete lines; what a killed program left is passed over."""
  content = path.read_bytes()
  complete = content[: content.rfind(b'\n') + 1]
  return [_parse(line, path) for line in complete.splitlines()]


def _json(path: pathlib.Path) -> dict[str, Any]:
  values = _parse(path.read_bytes(), path)
  return values if isinstance(values, dict) else {}


def _parse(text: bytes, path: pathlib.Path) -> Any:
  with errors.explained(f'{path} is no JSON: ', ValueError):
    return json.loads(text)
