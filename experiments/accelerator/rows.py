"""Rows of the report: a line of JSON for each measurement."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from swiftspec_jax.cli import output_files

OK = 'ok'
DIFFERS = 'differs'
REFUSED = 'refused'
FAILED = 'failed'
CRASHED = 'crashed'
TIMED_OUT = 'timed out'
NO_WEIGHTS = 'no weights'
NO_PACKAGE = 'no package'

ROWS = 'rows.jsonl'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One measurement; None is what it does not have.

  Attributes:
    section: name of the part of the report.
    name: name of what was measured.
    shape: sizes of the arguments, in words.
    seconds: seconds of one call, step or token, as the section says.
    reference_seconds: the same of what it is compared with.
    bandwidth_share: bytes that have to be moved, in these seconds, as a share
      of what the device reaches.
    max_error: greatest difference from the reference, as a share of its
      greatest number.
    status: one of the words above.
    reason: why the status is not 'ok'.
    figures: other known figures by name; JSON values.
    job_seconds: seconds that the measurement took, compilation included.
    device: JAX's name of the device's kind.
  """

  section: str = ''
  name: str = ''
  shape: str = ''
  seconds: float | None = None
  reference_seconds: float | None = None
  bandwidth_share: float | None = None
  max_error: float | None = None
  status: str = OK
  reason: str = ''
  figures: dict[str, Any] = dataclasses.field(default_factory=dict)
  job_seconds: float = 0.0
  device: str = ''

  @property
  def key(self) -> tuple[str, str]:
    """What tells it from the others of its section."""
    return self.name, self.shape


def read(directory: pathlib.Path) -> list[Row]:
  """Returns the rows of a report, none if it has not begun."""
  lines = output_files.read_lines(directory / ROWS)
  return [Row(**line) for line in lines]


def append(directory: pathlib.Path, rows: Sequence[Row]) -> None:
  """Adds rows to those of a report."""
  for row in rows:
    output_files.append_line(directory / ROWS, dataclasses.asdict(row))
