"""Compiles kernels and whole steps for TPUs and GPUs that need not be there.

  make aot

or `make aot-ci` for a part. The compilers are the real ones, and run on a CPU;
the arrays are abstract. The table says what fits, and nothing about speed: no
program is run.
"""

import collections
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence

# Neither the plug-ins nor JAX may look for devices.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TPU_SKIP_MDS_QUERY'] = '1'
# Without devices several processes may compile at once.
os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'

import jax
from absl import flags

from experiments.aot import (
  kernels,
  layer_launches,
  models,
  rows,
  steps,
  targets,
)
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program, provenance

_ROWS = 'rows.jsonl'
_LAUNCHES = 'launches.jsonl'
_SUITE = flags.DEFINE_multi_enum(
  'suite',
  ['kernels'],
  ['kernels', *models.PAIRS, 'launches'],
  'kernels: each kernel at all its shapes; tiny: the steps of a model of two '
  'layers; builtin: those of the built-in models; large: those of Llama 8B '
  'with 1B and 70B with 3B; targets: those of Llama 4 Scout and Gemma 4 31B, '
  'without drafts; launches: those that experiments.plan prices, whose '
  f'kernels {_LAUNCHES} then has.',
)
_EVERY = flags.DEFINE_integer(
  'every', 1, 'Compile a kernel at each Nth shape only.', lower_bound=1
)
_TARGET = flags.DEFINE_multi_enum(
  'target', list(targets.TARGETS), list(targets.TARGETS), 'Devices.'
)
_RESUME = flags.DEFINE_bool(
  'resume',
  False,
  'Compile only what has changed since the rows in --output were written.',
)
_OUTPUT = flags.DEFINE_string(
  'output', 'build/aot', f'Directory of {_ROWS} and provenance.json.'
)


def main() -> None:
  """Runs the program."""
  # A program out of the cache has met no compiler.
  jax.config.update('jax_enable_compilation_cache', False)
  directory = pathlib.Path(_OUTPUT.value)
  path = directory / _ROWS
  with output_files.writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    if not _RESUME.value:
      path.unlink(missing_ok=True)
  known = _accepted(path)
  done = []
  for job in _jobs():
    row = rows.compile_job(job, known)
    done.append(row)
    print(_line(row), flush=True)
    if row.fingerprint not in known:
      output_files.append_line(path, dataclasses.asdict(row))
  # Of a table that was resumed, only what belongs to it now.
  output_files.write_lines(path, [dataclasses.asdict(row) for row in done])
  if 'launches' in _SUITE.value:
    output_files.write_lines(directory / _LAUNCHES, layer_launches.table(done))
  output_files.write_json(directory / 'provenance.json', provenance.collect())
  print(_summary(done))
  print(f'written to {directory}')
  refused = [row for row in done if row.status == 'refused']
  if refused:
    raise errors.UserError(
      f'{len(refused)} of {len(done)} programs were refused by a compiler, '
      f'first {refused[0].name} {refused[0].shape} for '
      f'{refused[0].topology}: {refused[0].message}'
    )


def _accepted(path: pathlib.Path) -> dict[str, rows.Row]:
  """Returns the rows of a file by fingerprint, without the refused ones."""
  known = [rows.Row(**values) for values in output_files.read_lines(path)]
  return {row.fingerprint: row for row in known if row.status != 'refused'}


def _jobs() -> Iterator[rows.Job]:
  suites = set(_SUITE.value)
  for name in _TARGET.value:
    target = targets.TARGETS[name]
    if 'kernels' in suites:
      yield from kernels.jobs(target, _EVERY.value)
    for suite, pairs in models.PAIRS.items():
      if suite in suites:
        yield from itertools.chain.from_iterable(
          steps.jobs(pair, target) for pair in pairs
        )
    if 'launches' in suites:
      yield from layer_launches.jobs(target)


def _line(row: rows.Row) -> str:
  """Returns a row of the table; compilers count what they can."""
  cells = [
    f'{row.status:<11} {row.topology:<9} {row.name:<21}',
    _size(row.bytes_per_device, 'on a device'),
    _size(row.temp_bytes, 'temporary'),
    _size(row.code_bytes, 'code'),
    _size(row.collective_bytes, 'in a collective'),
  ]
  if row.optimal_seconds is not None:
    cells.append(f'bound {row.optimal_seconds * 1e6:7.1f} us')
  if row.launches is not None:
    count = sum(part['num_kernels'] for part in row.launches.values())
    cells.append(f'{count:5} kernels')
  if row.compile_seconds is not None:
    cells.append(f'compiled in {row.compile_seconds:5.1f} s')
  return '  '.join([*filter(None, cells), row.shape, row.message])


def _size(num_bytes: int | None, what: str) -> str:
  if num_bytes is None:
    return ''
  return f'{num_bytes / 2**20:9.2f} MiB {what}'


def _summary(done: Sequence[rows.Row]) -> str:
  counts = collections.Counter(
    (row.topology, row.name, row.status) for row in done
  )
  lines = [
    f'{topology:<9} {name:<21} {count:>4} {status}'
    for (topology, name, status), count in sorted(counts.items())
  ]
  return '\n'.join(['', *lines])


if __name__ == '__main__':
  program.run(main)
