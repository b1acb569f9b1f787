"""The times of kernels, and of what else does the same."""

import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import tqdm

from experiments.kernels import kernel_timing
from experiments.kernels.kernel_cases import Case
from experiments.measuring import benchmark_report
from swiftspec_jax.cli import output_files, provenance

_ROWS = 'rows.jsonl'
# What the device reaches: a copy's bytes, a product's operations.
Rates = dict[str, float]


def run(cases: Sequence[Case], repeats: int, directory: pathlib.Path) -> None:
  """Measures, and writes rows.jsonl and summary.json.

  Args:
    cases: kernels and their arguments.
    repeats: measurements of each, of which the median counts.
    directory: folder of the files, which are replaced.
  """
  with output_files.writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _ROWS).unlink(missing_ok=True)
  is_cpu = jax.default_backend() == 'cpu'
  copied, size = (2**25, 512) if is_cpu else (2**29, 8192)
  rates = {
    'bytes_per_second': kernel_timing.copy_bandwidth(copied, repeats),
    'flops_per_second': kernel_timing.matrix_rate(size, repeats),
  }
  print(_head(rates))
  rows = []
  for case in tqdm.tqdm(cases, desc='measuring', unit='shape', disable=None):
    rows.append(_measure(case, rates, repeats))
    output_files.append_line(directory / _ROWS, rows[-1])
  print(_table(rows))
  kernels = dict.fromkeys(case.kernel for case in cases)
  summary = {
    'rates': rates,
    'repeats': repeats,
    'kernels': {name: _summary(rows, name) for name in kernels},
    'provenance': provenance.collect(),
  }
  output_files.write_json(directory / 'summary.json', summary)
  print(f'written to {directory}')


def _measure(case: Case, rates: Rates, repeats: int) -> dict[str, Any]:
  """Returns a row of the table."""
  seconds, refused, baselines = {}, {}, set()
  for contender in case.contenders(jax.default_backend()):
    try:
      seconds[contender.name] = case.seconds_of(contender, repeats)
    # What a library cannot do is a fact of the table.
    except (RuntimeError, TypeError, ValueError) as error:
      refused[contender.name] = ' '.join(str(error).split())[:200]
    if contender.is_baseline:
      baselines.add(contender.name)
  timed = [name for name in baselines if name in seconds]
  best = min(timed, key=seconds.__getitem__, default=None)
  return _row(case, rates, seconds, refused, best)


def _row(case, rates, seconds, refused, best) -> dict[str, Any]:
  kernel = next(
    (n for n in seconds if n == 'native' or n.startswith('pallas_')), None
  )
  own = seconds.get(kernel or 'reference')
  bound = max(
    case.spec.num_bytes / rates['bytes_per_second'],
    case.spec.num_flops / rates['flops_per_second'],
  )
  return {
    'kernel': case.kernel,
    'shape': case.spec.name,
    'implementation': kernel,
    'best_baseline': best,
    'num_bytes': case.spec.num_bytes,
    'num_flops': case.spec.num_flops,
    'bound_seconds': bound,
    'seconds': seconds,
    'refused': refused,
    # Of the kernel, or of the reference where there is none.
    'share_of_bandwidth': own
    and case.spec.num_bytes / own / rates['bytes_per_second'],
    'share_of_matrix_rate': own
    and case.spec.num_flops / own / rates['flops_per_second'],
    'speedup_over_reference': kernel and seconds['reference'] / own,
    'speedup_over_baseline': kernel and best and seconds[best] / own,
  }


def _head(rates: Rates) -> str:
  device = jax.devices()[0]
  lines = [
    f'{device.device_kind}: a copy reaches '
    f'{rates["bytes_per_second"] / 1e9:,.1f} GB/s, a bfloat16 product '
    f'{rates["flops_per_second"] / 1e12:,.2f} TFLOP/s'
  ]
  if device.platform == 'cpu':
    lines.append(
      'ONLY NATIVE KERNELS RUN ON A CPU: all else are times of the references '
      'and of XLA, and say nothing about the other kernels.'
    )
  return '\n'.join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> str:
  columns = {
    'kernel': ('kernel',),
    'shape': ('shape',),
    'us': lambda row: _micro(row, row['implementation']),
    'bound us': ('bound_seconds', '.1f', 1e6),
    'bytes/s': ('share_of_bandwidth', '.0%'),
    'FLOP/s': ('share_of_matrix_rate', '.0%'),
    'reference': lambda row: _micro(row, 'reference'),
    'x': ('speedup_over_reference', '.2f'),
    'best baseline': lambda row: row['best_baseline'] or '-',
    'its us': lambda row: _micro(row, row['best_baseline']),
    'its x': ('speedup_over_baseline', '.2f'),
  }
  return benchmark_report.table_of(rows, columns, num_names=2)


def _micro(row: dict[str, Any], name: str | None) -> str:
  seconds = row['seconds'].get(name)
  return '-' if seconds is None else f'{seconds * 1e6:.1f}'


def _summary(rows: list[dict[str, Any]], kernel: str) -> dict[str, Any]:
  """Returns medians over the shapes of a kernel, None without one."""
  mine = [row for row in rows if row['kernel'] == kernel]
  fields = (
    'share_of_bandwidth',
    'speedup_over_reference',
    'speedup_over_baseline',
  )
  values = {
    field: [row[field] for row in mine if row[field] is not None]
    for field in fields
  }
  return {
    'num_shapes': len(mine),
    'num_refused': sum(bool(row['refused']) for row in mine),
    **{
      f'median_{field}': statistics.median(found) if found else None
      for field, found in values.items()
    },
  }
