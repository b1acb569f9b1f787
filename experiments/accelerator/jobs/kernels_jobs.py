"""Times of kernels, of XLA and of libraries at real shapes."""

import functools

import jax

from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels import kernel_timing
from experiments.kernels.kernel_cases import Case, Contender

_LOOP_ROUNDS = 20
_LOOP_SETS = 16  # each is a call that is compiled


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs."""
  return [
    Job(
      name=f'{case.kernel} {contender.name}',
      shape=case.spec.name,
      run=functools.partial(_measure, case, contender),
      is_baseline=contender.is_baseline,
    )
    for case in shapes.chosen_cases(tiny=settings.tiny, long_first=True)
    for contender in case.contenders(jax.default_backend())
  ]


def _measure(case: Case, contender: Contender) -> list[Row]:
  figures = {}
  if not contender.is_baseline and not case.spec.DONATED:
    sets = case.make_sets(contender.prepare)[:_LOOP_SETS]
    figures['loop_seconds'] = kernel_timing.loop_seconds(
      contender.call, sets, _LOOP_ROUNDS
    )
    del sets  # there may be no room for others besides
  seconds = case.seconds_of(contender, shapes.REPEATS)
  share = case.spec.num_bytes / seconds / shapes.bandwidth()
  row = Row(
    seconds=seconds,
    reference_seconds=_reference_seconds(case),
    # Libraries may read weights of another dtype.
    bandwidth_share=None if contender.is_baseline else share,
    figures={
      'operations_per_second': case.spec.num_flops / seconds,
      **figures,
    },
  )
  return [row]


@functools.lru_cache(maxsize=2)
def _reference_seconds(case: Case) -> float:
  reference = next(case.contenders(jax.default_backend()))
  return case.seconds_of(reference, shapes.REPEATS)
