"""Times calls by the device's own clock, so that launches do not count.

JAX's profiler says when each piece of work ran on a GPU or TPU; a call is the
sum of its pieces, without the gaps between them. Several sets of random
arguments take turns, so that caches do not hold what is read. Where a profiler
cannot be had, many calls in one program are timed from outside. A CPU has no
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
from absl import logging
from jax.profiler import ProfileData

from kernels_pallas.call_spec import Arrays
from swiftspec_jax import errors

_MIN_SETS, _MAX_SETS = 2, 64
_MAX_BYTES = 2**31  # of all sets
# What a device cannot keep near its processors: more than the 128 MiB of a TPU.
_CACHE_BYTES = 256 * 2**20
# On a GPU each kernel is an event of a stream, on a TPU each program is one of
# this line.
_PLANES = ('/device:GPU:0', '/device:TPU:0')
_LINES = ('Stream #', 'XLA Modules')
_ADDABLE = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8)


def num_sets(
  num_bytes: int, set_bytes: int, cache_bytes: int = _CACHE_BYTES
) -> int:
  """Returns how many sets of arguments exceed a cache, within limits.

  Args:
    num_bytes: bytes that a call reads and writes.
    set_bytes: bytes of its arguments, which may be more.
    cache_bytes: size of the cache.
  """
  wanted = -(-cache_bytes // max(num_bytes, 1))
  most = min(_MAX_SETS, _MAX_BYTES // max(set_bytes, 1))
  return max(min(wanted, most), _MIN_SETS)


def seconds_of(
  program: Callable[..., Any],
  sets: Sequence[Arrays],
  repeats: int,
  donated: tuple[int, ...] = (),
) -> float:
  """Returns the median of the seconds of a call.

  Args:
    program: a call as `jax.jit` returns it, given `donated`.
    sets: arguments, used in turn; those that are donated are gone afterwards.
    repeats: rounds through all sets.
    donated: arguments whose place the last results take.
  """
  sets = list(sets)

  def run(i: int) -> None:
    results = program(*sets[i])
    sets[i] = taken_back(sets[i], results, donated)
    jax.block_until_ready(results)

  for i in range(len(sets)):  # compiles, and fills what can be filled
    run(i)
  turns = [*range(len(sets))] * repeats
  if jax.default_backend() == 'cpu':
    return statistics.median(wall_seconds(run, i) for i in turns)
  if not has_clock():
    return loop_seconds(program, sets, repeats, donated)
  durations = device_seconds(profile(lambda: [run(i) for i in turns]))
  return median_call(durations, len(turns))


def taken_back(
  arrays: Arrays, results: Any, donated: tuple[int, ...]
) -> Arrays:
  """Returns the arguments of the next call, with the last results in place.

  Args:
    arrays: arguments of a call.
    results: results of the call: a tuple, or one pytree.
    donated: arguments whose place the last results take.
  """
  return _replaced(arrays, donated, _split(results, donated)[1])


def _replaced(arrays, places, others):
  others = dict(zip(places, others, strict=True))
  return tuple(others.get(i, array) for i, array in enumerate(arrays))


def _split(results, donated):
  """Returns the results of a call, and apart those that take places."""
  results = results if isinstance(results, tuple) else (results,)
  start = len(results) - len(donated)
  return results[:start], results[start:]


@functools.cache
def has_clock() -> bool:
  """Whether the device says when its work ran; if not, the log says why."""
  if jax.default_backend() == 'cpu':
    return False
  try:
    device_seconds(profile(lambda: jax.block_until_ready(jnp.ones(8) + 1)))
  except (RuntimeError, errors.UserError) as error:
    logging.warning('Calls are timed in loops from outside: %s', error)
    return False
  return True


def profile(run: Callable[[], Any]) -> ProfileData:
  """Returns what the profiler saw of a run, the calls of Python left out.

  Args:
    run: waits for its work.

  Raises:
    UserError: it has written no profile.
  """
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory, profiler_options=options):
      run()
    paths = list(pathlib.Path(directory).rglob('*.xplane.pb'))
    if len(paths) != 1:
      raise errors.UserError(
        f'the profiler of JAX has written {len(paths)} profiles in place of one'
      )
    return ProfileData.from_file(str(paths[0]))


def loop_seconds(
  call: Callable[..., Any],
  sets: Sequence[Arrays],
  num_rounds: int,
  donated: tuple[int, ...] = (),
) -> float:
  """Returns the mean seconds of a call among many in one program.

  It needs no profiler. The gaps between the pieces of a call count, and a sum
  of its first result that makes each call wait for the one before.

  Args:
    call: jittable.
    sets: arguments, used in turn; an array of each can be added to.
    num_rounds: through all sets; the program runs three times after it has
      been compiled, and the quickest counts.
    donated: arguments whose place the last results take.
  """
  call = jax.jit(call)  # lowered once for all sets

  def one_round(sets, state):
    zero, owned = state
    after = []
    for arrays, own in zip(sets, owned, strict=True):
      arrays = _waiting(_replaced(arrays, donated, own), zero)
      others, own = _split(call(*arrays), donated)
      after.append(own)
      for first in others[:1]:
        # Not zero if a result is no number, so it has to be computed.
        zero = 0 * first.sum(dtype=jnp.float32)
    return zero, after

  @jax.jit
  def program(sets):
    owned = [tuple(arrays[i] for i in donated) for arrays in sets]
    return jax.lax.fori_loop(
      0,
      num_rounds,
      lambda _, state: one_round(sets, state),
      (jnp.zeros((), jnp.float32), owned),
    )

  def run() -> None:
    jax.block_until_ready(program(list(sets)))

  run()  # compiles
  seconds = min(wall_seconds(run) for _ in range(3))
  return seconds / (num_rounds * len(sets))


def _waiting(arrays: Arrays, zero: jax.Array) -> Arrays:
  """Returns arguments of which the smallest array depends on `zero`."""
  leaves, treedef = jax.tree.flatten(arrays)
  usable = [i for i, x in enumerate(leaves) if x.dtype in _ADDABLE]
  smallest = min(usable, key=lambda i: leaves[i].size)
  leaves[smallest] += zero.astype(leaves[smallest].dtype)
  return treedef.unflatten(leaves)


def wall_seconds(run: Callable[..., Any], *args: Any) -> float:
  """Returns the seconds of a call on the clock of the host."""
  start = time.perf_counter()
  run(*args)
  return time.perf_counter() - start


def device_seconds(data: ProfileData) -> list[float]:
  """Returns how long each piece of work on the device took, in their order.

  Raises:
    UserError: the profile has no such times.
  """
  found = [
    (event.start_ns, event.duration_ns / 1e9)
    for plane in data.planes
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
    durations: seconds of the pieces, of one call after the other.
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
  return 2 * num_bytes / seconds_of(jax.jit(lambda x: x + 1), sets, repeats)


def read_bandwidth(num_bytes: int, repeats: int) -> float:
  """Returns the bytes per second of a sum."""
  size = num_bytes // 4
  sets = [(jnp.full(size, value, jnp.float32),) for value in (1.5, 2.5)]
  return num_bytes / seconds_of(jax.jit(jnp.sum), sets, repeats)


def matrix_rate(
  size: int,
  repeats: int,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
  precision: jax.lax.Precision | None = None,
) -> float:
  """Returns the operations per second of a product of that size."""
  is_integer = jnp.issubdtype(dtype, jnp.integer)
  random = functools.partial(jax.random.normal, shape=(size, size))
  keys = jax.random.split(jax.random.key(0), 4)
  a, b, c, d = ((9 * random(key)).astype(dtype) for key in keys)
  dot = functools.partial(
    jnp.dot,
    precision=precision,
    preferred_element_type=jnp.int32 if is_integer else None,
  )
  return 2 * size**3 / seconds_of(jax.jit(dot), [(a, b), (c, d)], repeats)
