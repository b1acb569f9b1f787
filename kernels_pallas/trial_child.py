"""The process in which kernels are compared with their references."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from kernels_pallas import comparison, tuning

_SECONDS_BEFORE_KERNEL = 60.0  # to open the device and to run the reference
_POLL_SECONDS = 0.05
_NUM_LOG_BYTES = 2_000
# Long before the process ends for want of work.
_MOST_IDLE_SECONDS = comparison.IDLE_SECONDS / 2
_SETTINGS = {
  # The parent may hold most of the memory.
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
  'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform',
  # The last line of a traceback is then the error.
  'JAX_TRACEBACK_FILTERING': 'off',
}


class Child:
  """A process that is started when it is wanted, as that takes long.

  It compares one kernel after the other. The first one that is no good ends it,
  as it may have spoiled the device, and so does a minute without work.
  """

  def __init__(self):
    self._process: subprocess.Popen[str] | None = None
    self._told: tuple[str | None, ...] = ()
    self._log: Any = None
    self._asked = 0.0

  def compare(
    self, trial: dict[str, Any], seconds: float
  ) -> tuple[dict[str, Any] | None, str]:
    """Compares a kernel with its reference.

    Args:
      trial: the kernel, as `Trial.request` returns it.
      seconds: most seconds that the kernel may take, to compile and to run.

    Returns:
      The fields of a `Comparison`: None if the reference has not run, empty if
      the comparison could not be made. Then, in words, how the process ended.
    """
    self._start()
    log_start = os.fstat(self._log.fileno()).st_size
    is_good = False
    try:
      with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, 'result.json')
        request = json.dumps({'trial': trial, 'path': str(path)})
        with contextlib.suppress(BrokenPipeError):  # it ends before it reads
          print(request, file=self._process.stdin, flush=True)
        said, end = self._wait(path, seconds)
      is_good = bool(said) and said['is_same']
      complaints = self._log_from(log_start)
    finally:  # also of a Ctrl-C
      self._asked = time.monotonic()
      if not is_good:
        self.end()
    return said, ': '.join([end, *(line[:200] for line in complaints[-1:])])

  def end(self) -> None:
    """Ends the process, if there is one, so that the device is free."""
    if self._process is None:
      return
    if self._process.poll() is None:
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._log.close()
    self._process = None

  def _start(self) -> None:
    told = (sys.executable, os.environ.get(tuning.VARIABLE))
    if self._process is not None:
      is_running = self._process.poll() is None
      is_idle = time.monotonic() - self._asked > _MOST_IDLE_SECONDS
      if is_running and not is_idle and told == self._told:
        return
      self.end()
    self._told = told
    self._log = tempfile.TemporaryFile()  # noqa: SIM115
    self._process = subprocess.Popen(
      [sys.executable, '-m', comparison.__name__],
      stdin=subprocess.PIPE,
      stdout=self._log,
      stderr=subprocess.STDOUT,
      env={
        **os.environ,
        **_SETTINGS,
        'PYTHONPATH': os.pathsep.join(sys.path),
      },
      start_new_session=True,
      text=True,
    )

  def _wait(
    self, path: pathlib.Path, seconds: float
  ) -> tuple[dict[str, Any] | None, str]:
    """Returns what `compare` does; does not end what takes too long."""
    limit = _SECONDS_BEFORE_KERNEL
    start = time.monotonic()
    said = None
    while self._process.poll() is None:
      if said is None and path.exists():
        limit, start = seconds, time.monotonic()
      said = _read(path)
      if said:
        return said, ''
      if time.monotonic() - start > limit:
        return said, f'took more than {limit:g} s'
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(_POLL_SECONDS)
    status = self._process.returncode
    if status < 0:
      return _read(path), f'crashed by {signal.Signals(-status).name}'
    return _read(path), f'failed with status {status}'

  def _log_from(self, start: int) -> list[str]:
    """Returns lines that the process has printed, the last ones at least."""
    size = os.fstat(self._log.fileno()).st_size
    start = max(start, size - _NUM_LOG_BYTES)
    text = os.pread(self._log.fileno(), size - start, start)
    return text.decode(errors='replace').splitlines()


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  return json.loads(path.read_text()) if path.exists() else None
