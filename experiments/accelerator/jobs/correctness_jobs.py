"""Each kernel against its reference, on the device."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from experiments.accelerator import rows as rows_lib
from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels.kernel_cases import KERNELS, Case, Contender
from kernels_pallas import comparison

_NUM_SETS = 2


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; on a CPU Triton kernels run in the interpreter."""
  return [
    Job(
      name=f'{case.kernel} {kernel.name}',
      shape=case.spec.name,
      run=functools.partial(_compare, case, kernel.call),
      limit=60.0,
    )
    for case in shapes.chosen_cases(tiny=settings.tiny)
    for kernel in _kernels(case)
  ]


def _kernels(case: Case) -> Iterator[Contender]:
  platform = jax.default_backend()
  if platform == 'cpu':
    call = KERNELS[case.kernel][1]['pallas_gpu']
    options = {**case.spec.options(), 'interpret': True}
    yield Contender(name='interpreted', call=functools.partial(call, **options))
  for contender in case.contenders(platform):
    if contender.name != 'reference' and not contender.is_baseline:
      yield contender


def _compare(case: Case, kernel: Callable[..., Any]) -> list[Row]:
  reference = next(case.contenders(jax.default_backend())).call
  want, got = (_results(case, call) for call in (reference, kernel))
  found = comparison.compare_results(case.spec, got, want)
  return [
    Row(
      max_error=found.max_error,
      status=rows_lib.OK if found.is_same else rows_lib.DIFFERS,
    )
  ]


def _results(case: Case, call: Callable[..., Any]) -> list[np.ndarray]:
  program = jax.jit(call)
  return [
    np.asarray(result)
    for key in jax.random.split(jax.random.key(1), _NUM_SETS)
    for result in jax.tree.leaves(program(*case.make_arrays(key)))
  ]
