"""Flags of the programs that time kernels: which ones, at which shapes."""

from absl import flags

from experiments.kernels import kernel_cases
from swiftspec_jax import errors

_KERNELS = tuple(kernel_cases.KERNELS)
KERNEL = flags.DEFINE_multi_enum('kernel', _KERNELS, _KERNELS, 'Kernels.')
_SHAPE = flags.DEFINE_multi_string(
  'shape', [''], 'Only shapes whose names have this in them; several add up.'
)
_EVERY = flags.DEFINE_integer(
  'every', 1, 'Take each Nth of these shapes only.', lower_bound=1
)
REPEATS = flags.DEFINE_integer(
  'repeats', 9, 'Measurements of which the median counts.', lower_bound=1
)


def cases() -> list[kernel_cases.Case]:
  """Returns the cases that the flags name.

  Raises:
    UserError: there is none.
  """
  found = [
    case
    for kernel in dict.fromkeys(KERNEL.value)
    for case in kernel_cases.cases(kernel)
    if any(part in case.spec.name for part in _SHAPE.value)
  ]
  if not found:
    raise errors.UserError(
      f'--shape={_SHAPE.value[-1]} is in the name of no shape of '
      f'{", ".join(KERNEL.value)}; names look like '
      f'{next(kernel_cases.cases(KERNEL.value[0])).spec.name!r}'
    )
  return found[:: _EVERY.value]
