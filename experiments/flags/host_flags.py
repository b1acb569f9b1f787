"""Flags of programs that run on several hosts at once."""

import jax
from absl import flags

from swiftspec_jax import errors

_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Work together with the same program on other hosts. JAX finds them on '
  'Cloud TPU, Slurm, Kubernetes and Open MPI; else give the next three flags.',
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator_address', None, 'With --distributed: host:port of process 0.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'With --distributed: how many.', lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'With --distributed: of this one.', lower_bound=0
)
_PLACES = (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)


def initialize() -> None:
  """Joins the other hosts; call it before anything asks JAX for devices.

  Raises:
    UserError: the flags contradict each other, or the others are not found.
  """
  given = [flag.name for flag in _PLACES if flag.value is not None]
  if given and (not _DISTRIBUTED.value or len(given) < len(_PLACES)):
    raise errors.UserError(
      f'--{given[0]} needs --distributed and all of '
      f'{", ".join(f"--{flag.name}" for flag in _PLACES)}'
    )
  if not _DISTRIBUTED.value:
    return
  try:
    jax.distributed.initialize(
      _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    )
  except (RuntimeError, ValueError) as error:
    raise errors.UserError(
      f'--distributed: the other processes are not found ({error}); give '
      f'{", ".join(f"--{flag.name}" for flag in _PLACES)}'
    ) from error
