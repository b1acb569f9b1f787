r"""Measures all that is open on the accelerator at hand, in calls of minutes.

  python -m experiments.accelerator_report --output_dir=DIR
  python -m experiments.accelerator_report --output_dir=DIR --resume

Sections come in order of value, and each adds its rows to DIR/rows.jsonl at
once; DIR/report.html is written after each of them. What does not fit into
--budget_seconds is left to a call with --resume, also on another machine of
the same kind, given what the former call wrote. On a CPU all sizes are tiny.
docs/how_to/accelerators.md says how to read the page.
"""

import os
import pathlib
import time
from collections.abc import Sequence

from absl import flags

from experiments.accelerator import page, runner, sections
from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Settings
from experiments.flags import run_flags
from experiments.output import benchmark_output
from swiftspec_jax.cli import program

_OUTPUT_DIR = run_flags.output_dir()
_BUDGET_SECONDS = flags.DEFINE_float(
  'budget_seconds', 540.0, 'Seconds of this call.', lower_bound=1.0
)
_RESUME = run_flags.resume()
_SECTIONS = flags.DEFINE_list(
  'sections',
  [],
  'Some of '
  f'{", ".join(section.name for section in sections.SECTIONS)}. Default: all.',
)
_MODEL = flags.DEFINE_string(
  'model',
  None,
  'SmolLM2-135M-Instruct: a directory or a .gguf file. Default: the built-in '
  'one where it is in the cache; nothing is downloaded.',
)
_TINY = flags.DEFINE_bool(
  'tiny', None, 'The smallest sizes. Default: on CPUs only.'
)

_PAGE_SECONDS = 5.0
_LEAST_SECONDS = 15.0  # of a child, which has to start first


def main() -> None:
  """Runs the program."""
  end = time.monotonic() + _BUDGET_SECONDS.value - _PAGE_SECONDS
  chosen = sections.choose(_SECTIONS.value)
  directory = pathlib.Path(_OUTPUT_DIR.value).absolute()
  run_settings = {'tiny': _TINY.value}
  benchmark_output.open_directory(directory, run_settings, resume=_RESUME.value)
  benchmark_output.write_settings(directory, run_settings)
  # A child must leave memory to the programs that it starts.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  rows = rows_lib.read(directory)
  settings = Settings(directory=directory, model=_MODEL.value, tiny=_TINY.value)
  try:
    _measure(chosen, settings, rows, end)
  finally:
    path = page.write(directory, rows)
    print(f'written to {path}')


def _measure(
  chosen: Sequence[sections.Section],
  settings: Settings,
  rows: list[Row],
  end: float,
) -> None:
  """Adds rows of the sections, as far as there is time."""
  spent: dict[str, float] = {}
  for row in rows:
    spent[row.section] = spent.get(row.section, 0.0) + row.job_seconds
  complete = set()
  for section, seconds in sections.plan(chosen, spent):
    now = time.monotonic()
    seconds = min(seconds, end - now)
    if seconds < _LEAST_SECONDS:
      return
    if section.name in complete:
      continue
    if runner.run_section(section, settings, rows, now + seconds, end):
      complete.add(section.name)
    page.write(settings.directory, rows)


if __name__ == '__main__':
  program.run(main)
