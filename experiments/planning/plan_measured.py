"""What `experiments.accelerator_report` has measured of a plan's chip."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from configs import launches, models
from configs.deployment import Deployment
from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from experiments.planning import plan_validation
from experiments.planning.plan_validation import Point
from swiftspec_jax import errors
from swiftspec_jax.simulator.planning import forward as forward_lib
from swiftspec_jax.simulator.planning.forward import Chip, Efficiency, Forward

_MEASURED = 'measured'
_FITTED = 'fitted to measured steps'
# Steps of the section `large` whose kernels are counted: model, and program.
STEPS = {
  '8B verify 8': (models.LLAMA_8B, 'verify'),
  '1B draft forward': (models.LLAMA_1B, 'grow'),
}
# Of each step; without them its forward is not known.
_FIGURES = 'tiny', 'weight_dtype', 'kernels', 'num_tokens', 'context'
_LEAST_STEPS = 2  # for the seconds of a launch, and a share of the bandwidth


def apply(
  deployment: Deployment, directory: pathlib.Path
) -> tuple[Deployment, list[Point]]:
  """Returns a deployment on the chip as it was measured, and what was fitted.

  Args:
    deployment: models and chips.
    directory: folder of a report of that chip.

  Raises:
    UserError: there is no report, it is of another chip, or an older version
      wrote it, and its steps lack a figure.
  """
  rows = [row for row in rows_lib.read(directory) if row.status == rows_lib.OK]
  if not rows:
    raise errors.UserError(
      f'{directory} has no measurements; name the --output_dir of '
      'experiments.accelerator_report'
    )
  _check_kind(deployment.chip, rows, directory)
  chip = _with_device(deployment.chip, rows)
  points, fitted = _points(rows, chip, directory), []
  if sum(p.forward.config.weight_dtype is None for p in points) >= _LEAST_STEPS:
    chip = _with_steps(chip, points)
    fitted = [dataclasses.replace(point, chip=chip) for point in points]
  measured = tuple(
    (
      point.forward,
      point.seconds / forward_lib.predict(point.forward, chip).total,
    )
    for point in points
  )
  return dataclasses.replace(deployment, chip=chip, measured=measured), fitted


def _check_kind(
  chip: Chip, rows: Sequence[Row], directory: pathlib.Path
) -> None:
  kinds = sorted({row.device for row in rows})
  if not set(kinds) <= set(chip.device_kinds):
    raise errors.UserError(
      f'{directory} was measured on {", ".join(kinds)}, but the plan is for '
      f'{chip.name} ({" or ".join(chip.device_kinds)}); name a report of that '
      'chip, or a config for the one that was measured'
    )


def _with_device(chip: Chip, rows: Sequence[Row]) -> Chip:
  """Returns a chip with the measured bandwidth and products.

  Shares of the bandwidth stay what they are in bytes a second, but nothing
  reads faster than what was measured.
  """
  figures = {row.name: row.figures for row in rows if row.section == 'device'}
  flops, sources = dict(chip.peak_flops), dict(chip.sources)
  for dtype in chip.peak_flops:
    if product := figures.get(f'product {dtype}'):
      flops[dtype] = product['operations_per_second']
      sources[f'peak_flops {dtype}'] = _MEASURED
  bandwidth, efficiency = chip.memory_bandwidth, chip.efficiency
  if 'read' in figures:
    bandwidth = figures['read']['bytes_per_second']
    sources['memory_bandwidth'] = _MEASURED
    efficiency = Efficiency(
      **{
        name: min(1.0, share * chip.memory_bandwidth / bandwidth)
        for name, share in dataclasses.asdict(efficiency).items()
      }
    )
  return dataclasses.replace(
    chip,
    peak_flops=flops,
    memory_bandwidth=bandwidth,
    efficiency=efficiency,
    sources=sources,
  )


def _points(
  rows: Sequence[Row], chip: Chip, directory: pathlib.Path
) -> list[Point]:
  """Returns the steps of real sizes; tiny ones say nothing of the chip."""
  found = []
  for row in rows:
    if row.name not in STEPS:
      continue
    _check_figures(row, directory)
    if row.figures['tiny']:
      continue
    config, program = STEPS[row.name]
    dtype = row.figures['weight_dtype']
    dtype = None if dtype == 'bfloat16' else dtype
    programs = launches.counted(dtype, row.figures['kernels'] != 'reference')
    found.append(
      Point(
        source=f'measured, {directory.name}',
        what=f'{row.name}, {row.shape}',
        forward=Forward(
          config=dataclasses.replace(config, weight_dtype=dtype),
          num_chips=1,
          num_tokens=row.figures['num_tokens'],
          context=row.figures['context'],
          launches=getattr(programs, program),
        ),
        chip=chip,
        seconds=row.seconds,
      )
    )
  return found


def _check_figures(row: Row, directory: pathlib.Path) -> None:
  for name in _FIGURES:
    if name not in row.figures:
      raise errors.UserError(
        f'{directory}/{rows_lib.ROWS} does not say {name!r} of {row.name!r}: '
        'an older version wrote it; make a new report with python -m '
        'experiments.accelerator_report --sections=device,large '
        '--output_dir=DIR'
      )


def _with_steps(chip: Chip, points: Sequence[Point]) -> Chip:
  """Returns a chip with the constants that the steps are fitted by."""
  names = ['launch_seconds', 'efficiency wide']
  if any(point.forward.config.weight_dtype for point in points):
    names.append('efficiency quantized')
  return dataclasses.replace(
    chip,
    **plan_validation.fit(points),
    sources={**chip.sources, **dict.fromkeys(names, _FITTED)},
  )


def constants(chip: Chip) -> list[dict[str, Any]]:
  """Returns a row for each number of a chip, with its source."""
  values = {
    'memory_bandwidth': (chip.memory_bandwidth, 'bytes/s'),
    **{
      f'peak_flops {dtype}': (flops, 'operations/s')
      for dtype, flops in chip.peak_flops.items()
    },
    'memory_bytes': (chip.memory_bytes, 'bytes'),
    'link_bandwidth': (chip.link_bandwidth, 'bytes/s'),
    'link_latency': (chip.link_latency, 's'),
    'launch_seconds': (chip.launch_seconds, 's'),
  }
  shares = {
    f'efficiency {name}': (share, 'of the bandwidth')
    for name, share in dataclasses.asdict(chip.efficiency).items()
  }
  fitted = dict.fromkeys(shares, 'fitted to published step times')
  sources = {**fitted, **chip.sources}
  return [
    {
      'number': name,
      'value': value,
      'unit': unit,
      'source': sources.get(name, 'data sheet'),
    }
    for name, (value, unit) in (values | shares).items()
  ]
