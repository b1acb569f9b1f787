"""An engine in a thread of its own, for programs with other things to do."""

import contextlib
import threading
from collections.abc import Iterator

from swiftspec_jax.serving.engine import Engine


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[Engine]:
  """Runs the steps of an engine in a thread inside the `with` block.

  At its end requests that are not finished are cancelled. If a step raises,
  whoever waits for a request gets a RuntimeError.
  """
  stop = threading.Event()
  thread = threading.Thread(target=_run, args=(engine, stop), daemon=True)
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


def _run(engine: Engine, stop: threading.Event) -> None:
  try:
    while not stop.is_set():
      if engine.step() is None:
        engine.wait_for_work()
  except BaseException as error:
    engine.fail(error)
    raise
