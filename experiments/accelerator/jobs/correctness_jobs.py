"""Each kernel against its reference, on the device."""

import functools
from collections.abc import Iterator

import jax

from experiments.accelerator import rows as rows_lib
from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels.kernel_cases import KERNELS, Case, Contender
from kernels_pallas import comparison, dispatch, trials


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs, without the shapes that agree in the section `first`."""
  rows = [] if settings.tiny else rows_lib.read(settings.directory)
  known = {
    row.key
    for row in rows
    if row.section == 'first' and row.status == rows_lib.OK
  }
  found = [
    Job(
      name=f'{case.kernel} {kernel.name}',
      shape=case.spec.name,
      run=functools.partial(_compare, case, kernel),
      limit=60.0,
    )
    for case in shapes.chosen_cases(tiny=settings.tiny)
    for kernel in kernels(case)
  ]
  return [job for job in found if job.key not in known]


def kernels(case: Case) -> Iterator[Contender]:
  """Yields the kernels of this project; on a CPU one in the interpreter."""
  platform = jax.default_backend()
  if platform == 'cpu':
    call = KERNELS[case.kernel][1]['pallas_gpu']
    options = {**case.spec.options(), 'interpret': True}
    yield Contender(name='interpreted', call=functools.partial(call, **options))
  for contender in case.contenders(platform):
    if contender.name != dispatch.REFERENCE and not contender.is_baseline:
      yield contender


def compare(case: Case, kernel: Contender) -> comparison.Comparison:
  """Compares a kernel, and keeps what `kernels='auto'` would ask for later."""
  found = comparison.compare_call(case.kernel, kernel.call, case.spec)
  if kernel.name in dispatch.IMPLEMENTATIONS:
    trials.keep(case.kernel, case.spec, kernel.name, found)
  return found


def _compare(case: Case, kernel: Contender) -> list[Row]:
  found = compare(case, kernel)
  status = rows_lib.OK if found.is_same else rows_lib.DIFFERS
  return [Row(max_error=found.max_error, status=status)]
