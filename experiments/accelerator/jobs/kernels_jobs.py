"""Times of kernels, of XLA and of libraries at real shapes."""

import functools
from collections.abc import Iterator

import jax

from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels import kernel_timing, torch_kernels
from experiments.kernels.kernel_cases import Case, Contender

_LOOP_ROUNDS = 20


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; PyTorch, which compiles for long, comes last."""
  cases = shapes.chosen_cases(tiny=settings.tiny)
  platform = jax.default_backend()
  found = [
    Job(
      name=f'{case.kernel} {contender.name}',
      shape=case.spec.name,
      run=functools.partial(_measure, case, contender),
    )
    for case in cases
    for contender in case.contenders(platform)
  ]
  if torch_kernels.is_usable():
    found += _torch_jobs(cases)
  return found


def _torch_jobs(cases) -> Iterator[Job]:
  for case in cases:
    for name, call in torch_kernels.contenders(case):
      yield Job(
        name=f'{case.kernel} {name}',
        shape=case.spec.name,
        run=functools.partial(_measure_torch, case, call),
        limit=120.0,
      )


def _measure(case: Case, contender: Contender) -> list[Row]:
  sets = shapes.make_sets(case, contender.prepare)
  figures = {}
  if not contender.is_baseline and not case.is_in_place:
    figures['loop_seconds'] = kernel_timing.loop_seconds(
      contender.call, sets, _LOOP_ROUNDS
    )
  seconds = kernel_timing.seconds_of(
    contender.call, sets, shapes.REPEATS, is_in_place=case.is_in_place
  )
  return [_row(case, seconds, figures)]


def _measure_torch(case: Case, call) -> list[Row]:
  count = kernel_timing.num_sets(case.num_bytes)
  keys = jax.random.split(jax.random.key(0), count)
  sets = [torch_kernels.tensors(case, case.make_arrays(key)) for key in keys]
  seconds = torch_kernels.seconds_of(call, sets, shapes.REPEATS)
  return [_row(case, seconds, {})]


def _row(case: Case, seconds: float, figures) -> Row:
  return Row(
    seconds=seconds,
    reference_seconds=_reference_seconds(case),
    bandwidth_share=case.num_bytes / seconds / shapes.bandwidth(),
    figures={
      'operations_per_second': case.num_flops / seconds,
      **figures,
    },
  )


@functools.lru_cache(maxsize=2)
def _reference_seconds(case: Case) -> float:
  reference = next(case.contenders(jax.default_backend()))
  return kernel_timing.seconds_of(
    reference.call,
    shapes.make_sets(case),
    shapes.REPEATS,
    is_in_place=case.is_in_place,
  )
