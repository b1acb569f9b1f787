"""Tiles of kernels, tried in a random order for as long as a job may take."""

import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import jax

from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels import tune
from experiments.kernels.kernel_cases import Case

_FILE = 'tiles.json'
_SECONDS = 25.0  # in which another config is begun
_REPEATS = 3


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; on a CPU, which has no kernels, there is none."""
  return [
    Job(
      name=f'{case.kernel} {implementation}',
      shape=case.spec.name,
      run=functools.partial(_tune, case, implementation, call, settings),
    )
    for case in shapes.chosen_cases(tiny=settings.tiny, long_first=True)
    for implementation, call in case.kernels(jax.default_backend())
  ]


def _tune(case: Case, implementation, call, settings) -> list[Row]:
  configs = list(tune.candidates(case.kernel, implementation))
  random.Random(0).shuffle(configs)
  tried: list[Any] = []
  entry = tune.tune(
    case, implementation, call, _in_time(configs, tried), _REPEATS
  )
  figures = {'num_tried': len(tried), 'num_configs': len(configs)}
  if entry is None:
    return [Row(figures={**figures, 'config': 'default'})]
  tune.add_entry(settings.directory / _FILE, entry)
  return [
    Row(
      seconds=entry.seconds,
      reference_seconds=entry.default_seconds,
      bandwidth_share=case.spec.num_bytes / entry.seconds / shapes.bandwidth(),
      figures={**figures, 'config': str(entry.config)},
    )
  ]


def _in_time(configs: list[Any], tried: list[Any]) -> Iterator[Any]:
  """Yields configs until the time is over, and notes them."""
  end = time.monotonic() + _SECONDS
  for config in configs:
    if time.monotonic() > end:
      return
    tried.append(config)
    yield config
