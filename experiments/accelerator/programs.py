"""Runs programs of `experiments` inside a job."""

import pathlib
import subprocess
import sys

from swiftspec_jax import errors

_ROOT = pathlib.Path(__file__).parents[2]


def run(name: str, *flags: str) -> None:
  """Runs a program to its end.

  Args:
    name: name of the program.
    *flags: as in a shell.

  Raises:
    UserError: it failed; with its last line.
  """
  command = [sys.executable, '-m', f'experiments.{name}', *flags]
  process = subprocess.run(
    command, cwd=_ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
  )
  if process.returncode:
    lines = process.stderr.decode(errors='replace').split('\n')
    last = next((line for line in lines[::-1] if line.strip()), '')
    raise errors.UserError(f'{name}: {last.strip()}')
