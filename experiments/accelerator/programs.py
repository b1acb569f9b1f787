"""Runs programs of `experiments` inside a job."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import tempfile

from swiftspec_jax import errors

_ROOT = pathlib.Path(__file__).parents[2]
_LEAVE_SECONDS = 20.0


def run(name: str, *flags: str, seconds: float | None = None) -> bool:
  """Runs a program; returns whether it came to its end.

  Args:
    name: name of the program.
    *flags: as in a shell.
    seconds: after which it gets a Ctrl-C; None never.

  Raises:
    UserError: it failed; with its last line.
  """
  command = [sys.executable, '-m', f'experiments.{name}', *flags]
  with tempfile.TemporaryFile() as log:
    with subprocess.Popen(
      command, cwd=_ROOT, stdin=subprocess.DEVNULL, stderr=log
    ) as process:
      try:
        process.wait(seconds)
      except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(_LEAVE_SECONDS)
        process.kill()
        return False
    if process.returncode:
      log.seek(0)
      lines = log.read().decode(errors='replace').split('\n')
      last = next((line for line in lines[::-1] if line.strip()), '')
      raise errors.UserError(f'{name}: {last.strip()}')
  return True
