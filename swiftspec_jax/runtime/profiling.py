"""What speed claims are measured against: compilations and bandwidth."""

import contextlib
import dataclasses
import itertools
import threading
import time
import timeit
from collections.abc import Iterator

import jax
import jax.numpy as jnp

_ALL_COMPILE_EVENTS = '/jax/core/compile/'  # tracing and lowering, too
_COMPILE_EVENT = f'{_ALL_COMPILE_EVENTS}backend_compile_duration'
_of_thread = threading.local()


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


def compile_seconds(since: float) -> float:
  """Returns the seconds in which this thread has traced and compiled.

  Args:
    since: time of `time.perf_counter` from which they count.
  """
  spans = reversed(getattr(_of_thread, 'compiling', ()))
  recent = itertools.takewhile(lambda span: span[1] > since, spans)
  return sum(end - max(start, since) for start, end in recent)


def _note_compilation(event: str, duration: float, **kwargs) -> None:
  """Keeps when this thread compiled; what is traced within a trace is in it."""
  del kwargs
  if not event.startswith(_ALL_COMPILE_EVENTS):
    return
  end = time.perf_counter()
  start = end - duration
  spans = _of_thread.__dict__.setdefault('compiling', [])
  while spans and spans[-1][1] > start:
    start = min(start, spans.pop()[0])
  spans.append((start, end))


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def measure_read_bandwidth() -> float:
  """Returns bytes per second that the default device reads at best.

  A sum over an array that is much larger than any cache. Decoding one token
  reads every weight once, so this bounds the rate of plain decoding.
  """
  array = jnp.ones(2**27, jnp.float32)
  total = jax.jit(jnp.sum)
  total(array).block_until_ready()
  seconds = timeit.repeat(
    lambda: total(array).block_until_ready(), repeat=3, number=1
  )
  return array.nbytes / min(seconds)
