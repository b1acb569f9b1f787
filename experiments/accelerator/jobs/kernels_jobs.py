"""Times of kernels, of XLA and of libraries at real shapes."""

import functools
from collections.abc import Iterator, Sequence

import jax

from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels import kernel_timing, torch_kernels
from experiments.kernels.kernel_cases import Case, Contender

_LOOP_ROUNDS = 20
_LOOP_SETS = 16  # each is a call that is compiled


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; PyTorch, which compiles for long, comes last."""
  cases = shapes.chosen_cases(tiny=settings.tiny, long_first=True)
  platform = jax.default_backend()
  found = [
    Job(
      name=f'{case.kernel} {contender.name}',
      shape=case.spec.name,
      run=functools.partial(_measure, case, contender),
      is_baseline=contender.is_baseline,
    )
    for case in cases
    for contender in case.contenders(platform)
  ]
  return [*found, *_torch_jobs(cases, platform)]


def _torch_jobs(cases: Sequence[Case], platform: str) -> Iterator[Job]:
  """Yields jobs of PyTorch on a GPU; it is imported by the first that runs."""
  if platform != 'gpu' or not torch_kernels.is_installed():
    return
  for case in cases:
    for name in torch_kernels.names(case):
      yield Job(
        name=f'{case.kernel} {name}',
        shape=case.spec.name,
        run=functools.partial(_measure_torch, case, name),
        limit=120.0,
        is_baseline=True,
      )


def _measure(case: Case, contender: Contender) -> list[Row]:
  figures = {}
  if not contender.is_baseline and not case.spec.DONATED:
    sets = case.make_sets(contender.prepare)[:_LOOP_SETS]
    figures['loop_seconds'] = kernel_timing.loop_seconds(
      contender.call, sets, _LOOP_ROUNDS
    )
    del sets  # there may be no room for others besides
  seconds = case.seconds_of(contender, shapes.REPEATS)
  return [_row(case, seconds, figures, is_baseline=contender.is_baseline)]


def _measure_torch(case: Case, name: str) -> list[Row]:
  seconds = torch_kernels.seconds_of(case, name, shapes.REPEATS)
  return [_row(case, seconds, {}, is_baseline=True)]


def _row(case: Case, seconds: float, figures, *, is_baseline: bool) -> Row:
  share = case.spec.num_bytes / seconds / shapes.bandwidth()
  return Row(
    seconds=seconds,
    reference_seconds=_reference_seconds(case),
    # Libraries may read weights of another dtype.
    bandwidth_share=None if is_baseline else share,
    figures={
      'operations_per_second': case.spec.num_flops / seconds,
      **figures,
    },
  )


@functools.lru_cache(maxsize=2)
def _reference_seconds(case: Case) -> float:
  reference = next(case.contenders(jax.default_backend()))
  return case.seconds_of(reference, shapes.REPEATS)
