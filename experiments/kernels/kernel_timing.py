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
  if not has_clock():
    return loop_seconds(call, sets, repeats, is_in_place=is_in_place)
  durations = busy_seconds(lambda: [run(i) for i in turns])
  return median_call(durations, len(turns))


@functools.cache
def has_clock() -> bool:
  """Whether the device says when its work ran; if not, the log says why."""
  if jax.default_backend() == 'cpu':
    return False
  try:
    busy_seconds(lambda: jax.block_until_ready(jnp.ones(8) + 1))
  except (RuntimeError, errors.UserError) as error:
    logging.warning('Calls are timed in loops from outside: %s', error)
    return False
  return True


def busy_seconds(run: Callable[[], Any]) -> list[float]:
  """Returns how long each piece of work took that `run` gives the device.

  Args:
    run: waits for its work.

  Raises:
    UserError: the device tells no times.
  """
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      run()
    (path,) = pathlib.Path(directory).rglob('*.xplane.pb')
    return device_seconds(ProfileData.from_file(str(path)))


def loop_seconds(
  call: Callable[..., Any],
  sets: Sequence[Arrays],
  num_rounds: int,
  *,
  is_in_place: bool = False,
) -> float:
  """Returns the mean seconds of a call among many in one program.

  It needs no profiler. The gaps between the pieces of a call count, and a sum
  of its results that makes each call wait for the one before.

  Args:
    call: jittable; its first array is one of floats.
    sets: arguments, used in turn.
    num_rounds: through all sets; the program runs three times after it has
      been compiled, and the quickest counts.
    is_in_place: the result takes the place of the first argument.
  """

  def call_in_turn(zero, sets):
    for arrays in sets:
      leaves, treedef = jax.tree.flatten(arrays)
      leaves[0] += zero.astype(leaves[0].dtype)
      results = jax.tree.leaves(call(*treedef.unflatten(leaves)))
      # Not zero if a result is no number, so it has to be computed.
      zero = 0 * sum(x.sum(dtype=jnp.float32) for x in results)
    return zero

  def call_in_place(firsts, sets):
    pairs = zip(firsts, sets, strict=True)
    return [call(first, *arrays[1:]) for first, arrays in pairs]

  @jax.jit
  def program(sets):
    start, one_round = jnp.zeros((), jnp.float32), call_in_turn
    if is_in_place:
      start, one_round = [arrays[0] for arrays in sets], call_in_place
    return jax.lax.fori_loop(
      0, num_rounds, lambda _, state: one_round(state, sets), start
    )

  def run(_: int) -> None:
    jax.block_until_ready(program(list(sets)))

  run(0)  # compiles
  seconds = min(_wall_seconds(run, 0) for _ in range(3))
  return seconds / (num_rounds * len(sets))


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
  return 2 * num_bytes / seconds_of(lambda x: x + 1, sets, repeats)


def read_bandwidth(num_bytes: int, repeats: int) -> float:
  """Returns the bytes per second of a sum."""
  size = num_bytes // 4
  sets = [(jnp.full(size, value, jnp.float32),) for value in (1.5, 2.5)]
  return num_bytes / seconds_of(jnp.sum, sets, repeats)


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
  return 2 * size**3 / seconds_of(dot, [(a, b), (c, d)], repeats)
