"""Runs a program of `experiments` in several processes that join each other."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import programs

# Imports take longer than most programs, so that they are made once. JAX
# starts no threads before it is used.
_FORKS = """
import gc, json, os, runpy, sys
gc.set_threshold(50_000)  # as in conftest.py
import matplotlib.pyplot, swiftspec_jax, transformers
module, calls = json.loads(sys.stdin.readline())
children = []
for flags, environment, *paths in calls:
  if child := os.fork():
    children.append(child)
    continue
  for number, path in enumerate(paths, start=1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
  os.environ.update(environment)
  sys.argv = ['', *flags]
  sys.orig_argv = [sys.executable, '-m', module, *flags]
  runpy.run_module(module, run_name='__main__', alter_sys=True)
print(json.dumps(children), flush=True)
statuses = [os.waitpid(child, 0)[1] for child in children]
print(json.dumps([*map(os.waitstatus_to_exitcode, statuses)]), flush=True)
"""


class Together:
  """Processes of one program.

  Attributes:
    process_ids: of the system.
  """

  def __init__(self, folder, program, *flags, environments):
    """Starts a process for each of `environments`, what is added to this one.

    Args:
      folder: gets what they write to their streams.
      program: module of `experiments`.
      *flags: of all.
      environments: of each.
    """
    count = len(environments)
    with socket.create_server(('localhost', 0)) as server:
      port = server.getsockname()[1]
    places = (
      '--distributed',
      f'--coordinator_address=localhost:{port}',
      f'--num_processes={count}',
    )
    self._paths = [
      [pathlib.Path(folder, f'{name}-{i}') for name in ('output', 'errors')]
      for i in range(count)
    ]
    calls = [
      [
        [*places, f'--process_id={i}', *flags],
        environments[i],
        *map(str, self._paths[i]),
      ]
      for i in range(count)
    ]
    self._parent = subprocess.Popen(
      [sys.executable, '-c', _FORKS],
      cwd=programs.ROOT,
      env=programs.environment(),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      encoding='utf-8',
    )
    self._parent.stdin.write(json.dumps([f'experiments.{program}', calls]))
    self._parent.stdin.write('\n')
    self._parent.stdin.flush()
    self._statuses = None
    self.process_ids = json.loads(self._parent.stdout.readline())

  def output(self, i):
    """What process `i` has written to standard output."""
    return self._paths[i][0].read_text(errors='replace')

  def kill(self):
    """Does what `finish` does, but ends those that still run."""
    for process_id in self.process_ids:
      with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)
    return self.finish()

  def finish(self):
    """Waits for all; returns exit status, output and errors of each."""
    if self._statuses is None:
      statuses, _ = self._parent.communicate(timeout=600)
      self._statuses = json.loads(statuses)
    return [
      (status, *(path.read_text(errors='replace') for path in paths))
      for status, paths in zip(self._statuses, self._paths, strict=True)
    ]


def run(folder, program, *flags, count):
  """Runs `count` processes to their ends and returns their outputs."""
  together = Together(folder, program, *flags, environments=[{}] * count)
  results = together.finish()
  assert all(status == 0 for status, _, _ in results), results
  return [output for _, output, _ in results]
