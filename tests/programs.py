"""Runs the programs of `experiments` as their users do."""

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
# A job in the background of a shell ignores Ctrl-C, and so do its children. A
# program that hangs says where its threads are, and ends.
_LAUNCHER = """
import faulthandler, gc, runpy, signal
faulthandler.dump_traceback_later(300, exit=True)
gc.set_threshold(50_000)  # as in conftest.py
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module({module!r}, run_name='__main__', alter_sys=True)
"""
# Imports take longer than most programs. This one makes them once, and forks
# for each line that names a module, its arguments, the files for its streams
# and its environment. JAX starts no threads before it is used.
_FORKS = """
import faulthandler, gc, json, os, runpy, sys
gc.set_threshold(50_000)
import matplotlib.pyplot, optax, swiftspec_jax, transformers
gc.freeze()
while line := sys.stdin.readline():
  module, flags, streams, environment = json.loads(line)
  if child := os.fork():
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
    continue
  for number, path in enumerate(streams):
    os.dup2(os.open(path, os.O_RDWR), number)
  faulthandler.dump_traceback_later(300, exit=True)
  os.environ.clear()
  os.environ.update(environment)
  sys.argv = ['', *flags]
  sys.orig_argv = [sys.executable, '-m', module, *flags]
  runpy.run_module(module, run_name='__main__', alter_sys=True)
  break
"""


def environment():
  return {**os.environ, 'HF_HUB_OFFLINE': '1', 'JAX_PLATFORMS': 'cpu'}


def _open(code, *flags, **options):
  return subprocess.Popen(
    [sys.executable, '-c', code, *flags],
    cwd=ROOT,
    env=environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    encoding='utf-8',
    errors='replace',
    **options,
  )


def start(program, *flags):
  """Starts a program; its streams are pipes."""
  code = _LAUNCHER.format(module=f'experiments.{program}')
  return _open(code, *flags, stderr=subprocess.PIPE)


def finish(process, text=''):
  """Waits for the end; returns exit status, standard output and error."""
  output, complaints = process.communicate(text, timeout=600)
  assert 'Traceback' not in complaints, complaints
  return process.returncode, output, complaints


@functools.cache
def _forks():
  process = _open(_FORKS)
  atexit.register(process.communicate)
  return process


def run(program, *flags, text=''):
  """Runs a program to its end, with `text` as its input.

  What its modules read from the environment as they are imported, such as
  JAX's settings, is that of the first call; `start` takes the present one.
  """
  with tempfile.TemporaryDirectory() as folder:
    paths = [pathlib.Path(folder, name) for name in ('in', 'out', 'error')]
    for path in paths:
      path.write_text(text if path.name == 'in' else '')
    streams = [*map(str, paths)]
    call = [f'experiments.{program}', flags, streams, environment()]
    _forks().stdin.write(json.dumps(call) + '\n')
    _forks().stdin.flush()
    status = int(_forks().stdout.readline())
    output, complaints = (p.read_text(errors='replace') for p in paths[1:])
  assert 'Traceback' not in complaints, complaints
  return status, output, complaints


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
