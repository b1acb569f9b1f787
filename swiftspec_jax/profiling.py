"""What speed claims are measured against: compilations and bandwidth."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

_COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


@dataclasses.dataclass
class CompilationCount:
  """How many programs were compiled, or read from the persistent cache."""

  count: int = 0


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCount]:
  """Counts compilations inside the `with` block, of all threads."""
  counter = CompilationCount()

  def listen(event: str, duration: float, **kwargs) -> None:
    del duration, kwargs
    counter.count += event == _COMPILE_EVENT

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield counter
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def measure_read_bandwidth(
  num_bytes: int = 512 * 1024**2, num_repeats: int = 10
) -> float:
  """Returns bytes per second that the default device reads at best.

  A sum over an array that is much larger than any cache. Decoding one token
  reads every weight once, so this bounds the rate of plain decoding.
  """
  array = jnp.ones(num_bytes // 4, jnp.float32)
  total = jax.jit(jnp.sum)
  total(array).block_until_ready()
  best = float('inf')
  for _ in range(num_repeats):
    start = time.perf_counter()
    total(array).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return num_bytes / best
