"""Flags of programs that run on several hosts at once."""

import os
import pathlib
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import jax
import jaxlib
from absl import flags

import kernels_pallas
import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.cli import program
from swiftspec_jax.runtime import hosts

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
_JOIN_TIMEOUT = flags.DEFINE_integer(
  'join_timeout',
  300,
  'With --distributed: seconds in which all processes must have started.',
  lower_bound=1,
)
_PLACES = (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)
_before_end: list[Callable[[str], None]] = []


def initialize(*own_flags: str) -> None:
  """Joins the other hosts; call it before anything asks JAX for devices.

  Args:
    *own_flags: names of flags that may differ, and are told to nobody.

  Raises:
    UserError: the flags contradict each other or those of other processes, or
      the others are not found.
  """
  given = [flag.name for flag in _PLACES if flag.value is not None]
  if given and (not _DISTRIBUTED.value or len(given) < len(_PLACES)):
    raise errors.UserError(
      f'--{given[0]} needs --distributed and all of '
      f'{", ".join(f"--{flag.name}" for flag in _PLACES)}'
    )
  if not _DISTRIBUTED.value:
    return
  timeout = _JOIN_TIMEOUT.value
  place = hosts.find_place(*(flag.value for flag in _PLACES), timeout)
  hosts.join(place, _facts(own_flags), timeout=timeout, on_end=_end)
  if place.process_id:
    # Process 0 says it all; errors go where standard error was.
    sys.stdout = sys.stderr = open(os.devnull, 'w')  # noqa: SIM115
  else:
    sys.stdout = os.fdopen(os.dup(1), 'w', encoding=sys.stdout.encoding)
  # What libraries below Python write to standard output belongs there, too.
  os.dup2(2, 1)


def before_end(call: Callable[[str], None]) -> None:
  """Has `call` called with the reason when another's end ends this process."""
  _before_end.append(call)


def _facts(own_flags: Collection[str]) -> dict[str, Any]:
  """Returns what must be the same in all processes."""
  code = [pathlib.Path(x.__file__).parent for x in (ss, kernels_pallas)]
  values = {
    f'--{flag.name}': flag.value
    for module, found in flags.FLAGS.flags_by_module_dict().items()
    if not module.startswith('absl')
    for flag in found
    if flag.name not in (_PROCESS_ID.name, *own_flags)
  }
  return {
    **values,
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'swiftspec_jax': ss.__version__,
    'code of swiftspec_jax': [hosts.fingerprint(x, '*.py') for x in code],
  }


def _end(reason: str) -> NoReturn:
  for call in _before_end:
    call(reason)
  print('error:', reason, file=sys.__stderr__)
  sys.__stderr__.flush()
  hosts.wait_for_others()
  program.leave(1)
