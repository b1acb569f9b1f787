"""An engine in a thread of its own, for programs with other things to do."""

import contextlib
import threading
from collections.abc import Callable, Generator

from swiftspec_jax.engine import left_iterators
from swiftspec_jax.engine.engine import Engine, StepRecord
from swiftspec_jax.runtime import hosts
from swiftspec_jax.runtime.connections import FirstHasLeftError


@contextlib.contextmanager
@left_iterators.closed_at_exit
def running(
  engine: Engine, on_step: Callable[[StepRecord], None] | None = None
) -> Generator[Engine, None, None]:
  """Runs the steps of an engine in a thread inside the `with` block.

  At its end requests that are not finished are cancelled. If a step raises,
  whoever waits for a request gets an EngineError.

  Args:
    engine: engine to run.
    on_step: function that is called in that thread after each step.
  """
  stop = threading.Event()
  thread = threading.Thread(
    target=_run, args=(engine, on_step, stop), daemon=True
  )
  engine.is_running = True
  thread.start()
  try:
    yield engine
  finally:
    stop.set()
    engine.wake()
    thread.join()
    engine.is_running = False
    engine.cancel_all()


def _run(
  engine: Engine,
  on_step: Callable[[StepRecord], None] | None,
  stop: threading.Event,
) -> None:
  try:
    while not stop.is_set():
      record = engine.step()
      if record is None:
        engine.wait_for_work()
      elif on_step is not None:
        on_step(record)
  except BaseException as error:
    engine.fail(error)
    hosts.wait_for_end()  # what it may be a consequence of
    raise


def follow(engine: Engine) -> None:
  """Repeats the steps of process 0 in another one, until that has left."""
  with contextlib.suppress(FirstHasLeftError):
    while True:
      engine.step()
