"""Processes, one for each host, that decode or train together.

Before JAX starts, all others connect to process 0. They compare what must be
the same, and the connections stay open: one that breaks tells at once that a
process has ended, where JAX would wait for heartbeats and then abort.
"""

import hashlib
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax

from swiftspec_jax import errors
from swiftspec_jax.runtime import connections
from swiftspec_jax.runtime.connections import Connections, Place

_SAMPLE_BYTES = 1 << 16  # of a file, at its start, middle and end
_SECONDS_TO_END = 5  # for the news of an end to arrive
_SECONDS_TO_GO = 15


def find_place(
  address: str | None,
  num_processes: int | None,
  process_id: int | None,
  timeout: int,
) -> Place:
  """Returns the place, asking the cluster for what is None.

  Raises:
    UserError: the cluster does not know, or the counts contradict each other.
  """
  found = (address, num_processes, process_id)
  if None in found:
    # Only `jax.distributed.initialize` uses it in public, and starts JAX.
    from jax._src.clusters import ClusterEnv

    try:
      *found, _ = ClusterEnv.auto_detect_unset_distributed_params(
        *found, None, None, timeout
      )
    except (RuntimeError, ValueError, OSError, KeyError) as error:
      raise errors.UserError(
        f'--distributed: the cluster does not say where process 0 is ({error})'
      ) from error
  address, num_processes, process_id = found
  if None in found:
    raise errors.UserError(
      '--distributed: this is no cluster that JAX knows (Cloud TPU, Slurm, '
      'Kubernetes, Open MPI); give --coordinator_address, --num_processes, '
      '--process_id'
    )
  if process_id >= num_processes:
    raise errors.UserError(
      f'--process_id={process_id} must be less than '
      f'--num_processes={num_processes}'
    )
  if not address.rpartition(':')[2].isdecimal():
    raise errors.UserError(f'--coordinator_address={address} must be host:port')
  return Place(
    address=address, num_processes=num_processes, process_id=process_id
  )


def join(
  place: Place,
  facts: Mapping[str, Any],
  *,
  timeout: float,
  on_end: Callable[[str], NoReturn],
) -> None:
  """Meets the other processes and starts JAX with them.

  Call it before anything asks JAX for devices.

  Args:
    place: place of this process.
    facts: JSON values by name; must be the same in all processes.
    timeout: seconds in which all must be there.
    on_end: function that must end this process. It is called in a thread, with
      the reason, when another process ends before its work is done.

  Raises:
    UserError: not all are there in time, or their facts differ.
  """
  global _group
  group = Connections(place, on_end)
  deadline = time.monotonic() + timeout
  port = group.meet(facts, deadline)
  host = place.address.rpartition(':')[0]
  # Between CPUs, and between devices whose backend has no transfers of its own.
  jax.config.update(
    'jax_cross_host_transfer_socket_address',
    f'{group.own_host}:{connections.free_port()}',
  )
  jax.config.update(
    'jax_cross_host_transport_addresses', ','.join([f'{group.own_host}:0'] * 4)
  )
  # It would keep SIGTERM from ending the process.
  jax.config.update('jax_enable_preemption_service', False)
  with errors.explained('--distributed: ', (RuntimeError, ValueError)):
    jax.distributed.initialize(
      f'{host}:{port}',
      place.num_processes,
      place.process_id,
      initialization_timeout=max(int(deadline - time.monotonic()), 1),
    )
  _group = group


def is_together() -> bool:
  """Whether this process has joined others."""
  return _group is not None


def num_processes() -> int:
  """Returns how many work together; does not start JAX."""
  return 1 if _group is None else _group.num_processes


def exchange(value: Any) -> list[Any]:
  """Returns the JSON values of all processes; all must call it.

  Raises:
    UserError: JAX knows other processes that have not joined.
  """
  if _group is not None:
    return _group.exchange(value)
  if jax.process_count() > 1:
    raise errors.UserError(
      f'{jax.process_count()} processes have to agree here; start them with '
      'swiftspec_jax.runtime.hosts.join instead of jax.distributed.initialize'
    )
  return [value]


def from_process_zero(make: Callable[[], Any]) -> Any:
  """Returns a JSON value of process 0, which waits for nobody.

  All must call it, in the same order and from one thread of each.

  Args:
    make: function that returns the value; only process 0 calls it.

  Raises:
    FirstHasLeftError: process 0 has left, as its work is done.
  """
  return make() if _group is None else _group.from_process_zero(make)


def agree(facts: Mapping[str, Any]) -> None:
  """Compares facts, as `join` does; all must call it.

  Raises:
    UserError: they differ; in all processes.
  """
  reports = exchange(dict(facts))
  for process_id, report in enumerate(reports):
    difference = connections.find_difference(reports[0], report, process_id)
    if difference is not None:
      raise errors.UserError(difference)


def leave(error: str | None = None) -> None:
  """Tells the others that this process ends, and why if it had to.

  Does not return if another one's end is already ending this process.
  """
  if _group is not None:
    _group.leave(error)


def wait_for_others() -> None:
  """Has process 0, as it ends, wait a moment until the others have gone.

  Without JAX's service, which runs in process 0, they would be aborted, in the
  midst of their own last words.
  """
  if _group is not None:
    _group.wait_for_others(_SECONDS_TO_GO)


def wait_for_end() -> None:
  """Gives the news time to arrive that another process has ended."""
  if _group is not None:
    time.sleep(_SECONDS_TO_END)


def fingerprint(path: pathlib.Path, pattern: str = '*') -> str:
  """Returns a hash of a file, or of those in a directory.

  Large files count with their sizes and three samples.
  """
  digest = hashlib.sha256()
  paths = [path] if path.is_file() else sorted(path.rglob(pattern))
  for file in filter(pathlib.Path.is_file, paths):
    size = file.stat().st_size
    digest.update(f'{file.relative_to(path)} {size}'.encode())
    with file.open('rb') as content:
      for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
        content.seek(start)
        digest.update(content.read(_SAMPLE_BYTES))
  return digest.hexdigest()[:16]


_group: Connections | None = None
