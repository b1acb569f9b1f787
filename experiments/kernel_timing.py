"""Times calls by the device's own clock, so that launches do not count.

JAX's profiler says when each piece of work ran on a GPU or TPU; a call is the
sum of its pieces, without the gaps between them. Several sets of random
arguments take turns, so that caches do not hold what is read. A CPU has no
such clock; there calls are timed from outside, launch included.
"""

import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from kernels_pallas.call_spec import Arrays
from swiftspec_jax import errors

_MIN_SETS, _MAX_SETS = 2, 8
# What a device cannot keep near its processors: more than the 128 MiB of a TPU.
_CACHE_BYTES = 256 * 2**20
# On a GPU each kernel is an event of a stream, on a TPU each program is one of
# this line.
_PLANES = ('/device:GPU:0', '/device:TPU:0')
_LINES = ('Stream #', 'XLA Modules')


def num_sets(num_bytes: int, cache_bytes: int = _CACHE_BYTES) -> int:
  """Returns how many sets of arguments exceed a cache, within limits."""
  wanted = -(-cache_bytes // max(num_bytes, 1))
  return min(max(wanted, _MIN_SETS), _MAX_SETS)


def seconds_of(
  call: Callable[..., Any],
  sets: Sequence[Arrays],
  repeats: int,
  *,
  is_in_place: bool = False,
) -> float:
  """Returns the median of the seconds of a call.

  Args:
    call: jittable.
    sets: arguments, used in turn.
    repeats: rounds through all sets.
    is_in_place: the result takes the place of the first argument.
  """
  program = jax.jit(call, donate_argnums=(0,) if is_in_place else ())
  sets = list(sets)

  def run(i: int) -> None:
    result = program(*sets[i])
    if is_in_place:
      sets[i] = (result, *sets[i][1:])
    jax.block_until_ready(result)

  for i in range(len(sets)):  # compiles, and fills what can be filled
    run(i)
  turns = [*range(len(sets))] * repeats
  if jax.default_backend() == 'cpu':
    return statistics.median(_wall_seconds(run, i) for i in turns)
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      for i in turns:
        run(i)
    (path,) = pathlib.Path(directory).rglob('*.xplane.pb')
    durations = device_seconds(ProfileData.from_file(str(path)))
  return median_call(durations, len(turns))


def _wall_seconds(run, i):
  start = time.perf_counter()
  run(i)
  return time.perf_counter() - start


def device_seconds(profile: ProfileData) -> list[float]:
  """Returns how long each piece of work on the device took, in their order.

  Raises:
    UserError: the profile has no such times.
  """
  found = [
    (event.start_ns, event.duration_ns / 1e9)
    for plane in profile.planes
    if plane.name in _PLANES
    for line in plane.lines
    if line.name.startswith(_LINES)
    for event in line.events
  ]
  if not found:
    raise errors.UserError(
      'the profiler of JAX has recorded no work of the device; on a GPU it '
      'needs the library CUPTI and the permission to read its counters'
    )
  return [seconds for _, seconds in sorted(found)]


def median_call(durations: Sequence[float], num_calls: int) -> float:
  """Returns the median of the sums of each call's pieces.

  Args:
    durations: of the pieces, of one call after the other.
    num_calls: all of the same number of pieces; if that cannot be, the mean
      is returned.
  """
  size, rest = divmod(len(durations), num_calls)
  if rest:
    return sum(durations) / num_calls
  return statistics.median(
    sum(durations[i : i + size]) for i in range(0, len(durations), size)
  )


def copy_bandwidth(num_bytes: int, repeats: int) -> float:
  """Returns the bytes per second, read and written, of a copy."""
  size = num_bytes // 2
  sets = [(jnp.full(size, value, jnp.bfloat16),) for value in (1.5, 2.5)]
  return 2 * num_bytes / seconds_of(lambda x: x + 1, sets, repeats)


def matrix_rate(size: int, repeats: int) -> float:
  """Returns the operations per second of a bfloat16 product of that size."""
  random = functools.partial(
    jax.random.normal, shape=(size, size), dtype=jnp.bfloat16
  )
  keys = jax.random.split(jax.random.key(0), 4)
  a, b, c, d = map(random, keys)
  return 2 * size**3 / seconds_of(jnp.dot, [(a, b), (c, d)], repeats)
