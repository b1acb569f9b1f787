"""Seconds of compilation, and rates that do not count them."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest
from decoding_cases import request_of

import swiftspec_jax as ss
from swiftspec_jax.runtime import profiling

pytestmark = pytest.mark.usefixtures('no_programs')


def compile_anew():
  """Traces and compiles a function that nobody has called."""

  @jax.jit
  def inner(x):
    return jnp.sin(x) @ x

  jax.jit(lambda x: inner(inner(x)) + inner(x).T)(jnp.ones((3, 3)))


def test_compilations_are_counted_once_and_in_their_thread():
  start = time.perf_counter()
  compile_anew()
  end = time.perf_counter()
  assert 0 < profiling.compile_seconds(start) < end - start
  assert profiling.compile_seconds(end) == 0
  thread = threading.Thread(target=compile_anew)
  thread.start()
  thread.join()
  assert profiling.compile_seconds(end) == 0


def test_a_rate_counts_neither_prompt_nor_compilation(model):
  decoder = ss.Decoder(ss.load(model))
  decoder.warmup(11)
  request = request_of((1, 2, 3), max_new_tokens=8, ignore_eos=True)
  first = None
  for event in decoder.run([request]):
    first = first or time.perf_counter()
    if event.result is None:
      for _ in range(4):
        compile_anew()
  stats = event.result.stats
  assert stats.decoded_tokens == 7
  seconds = stats.latency_seconds - stats.ttft_seconds
  compiling = profiling.compile_seconds(first)
  tolerance = 1e-3
  assert compiling > 2 * tolerance  # so that the next line tells them apart
  assert stats.decode_seconds == pytest.approx(
    seconds - compiling, abs=tolerance
  )
  assert stats.tokens_per_second == 7 / stats.decode_seconds


def test_an_output_that_came_at_once_has_no_rate(model):
  (result,) = ss.generate(ss.load(model), 'hello', max_new_tokens=1)
  assert result.stats.tokens_per_second is None


def test_the_time_of_a_step_has_no_compilation(model):
  request = request_of((1, 2, 3), max_new_tokens=2, ignore_eos=True)
  # Sizes that no other test has.
  with ss.Decoder(ss.load(model), batch_size=5).engine_for([request]) as engine:
    engine.submit(request)
    start = time.perf_counter()
    record = engine.step()
    seconds = time.perf_counter() - start
  compiling = profiling.compile_seconds(start)
  assert compiling > 0
  assert 0 < record.seconds <= seconds - compiling
