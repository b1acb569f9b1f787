"""Each kernel against its reference, on the device."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from experiments import tune_kernels
from experiments.accelerator import rows as rows_lib
from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernel_cases import KERNELS, Case, Contender

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
  reference = jax.jit(next(case.contenders(jax.default_backend())).call)
  kernel = jax.jit(kernel)
  error = 0.0
  for key in jax.random.split(jax.random.key(1), _NUM_SETS):
    arrays = case.make_arrays(key)
    error = max(error, max_error(kernel(*arrays), reference(*arrays)))
  # Comparisons with NaN are false.
  is_same = error <= tune_kernels.TOLERANCES.get(case.kernel, 0.0)
  status = rows_lib.OK if is_same else rows_lib.DIFFERS
  return [Row(max_error=error, status=status)]


def max_error(got: Any, want: Any) -> float:
  """Returns the greatest difference, of the greatest number of each array.

  Infinity where only one of them is finite, or where they differ and all that
  is wanted is zero.
  """
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return max(_error(*map(_float64, pair)) for pair in pairs)


def _float64(array: jax.Array) -> np.ndarray:
  return np.asarray(array).astype(np.float64)


def _error(got: np.ndarray, want: np.ndarray) -> float:
  is_same = (got == want) | (np.isnan(got) & np.isnan(want))
  if is_same.all():
    return 0.0
  if not (np.isfinite(got) & np.isfinite(want))[~is_same].all():
    return float('inf')
  highest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
  difference = np.abs(got - want)[~is_same].max()
  return float(difference / highest) if highest else float('inf')
