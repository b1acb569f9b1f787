"""Runs the programs of `experiments` as their users do."""

import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
# A job in the background of a shell ignores Ctrl-C, and so do its children.
_LAUNCHER = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module({module!r}, run_name='__main__', alter_sys=True)
"""


def start(program, *flags):
  """Starts a program; its streams are pipes."""
  return subprocess.Popen(
    [
      sys.executable,
      '-c',
      _LAUNCHER.format(module=f'experiments.{program}'),
      *flags,
    ],
    cwd=ROOT,
    env={**os.environ, 'HF_HUB_OFFLINE': '1', 'JAX_PLATFORMS': 'cpu'},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    encoding='utf-8',
    errors='replace',
  )


def finish(process, text=''):
  """Waits for the end; returns exit status, standard output and error."""
  output, complaints = process.communicate(text, timeout=600)
  assert 'Traceback' not in complaints, complaints
  return process.returncode, output, complaints


def run(program, *flags, text=''):
  """Runs a program to its end, with `text` as its input."""
  with start(program, *flags) as process:
    return finish(process, text)


def error_of(program, *flags):
  """Returns the one line with which a program refuses to work."""
  status, _, complaints = run(program, *flags)
  assert status == 1
  lines = [
    line
    for line in complaints.splitlines()
    # The second line of a message about flags that do not parse.
    if not line.startswith('Pass --help')
  ]
  assert len(lines) == 1, complaints
  return lines[0]


def wait_for(condition):
  """Waits until `condition()` is true."""
  deadline = time.monotonic() + 90
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)
