"""Runs programs as their users do."""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import signal
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
# Imports take longer than most programs. This one makes them once. It forks for
# each line that names a module, its arguments, the files for its streams and
# its environment, and waits for the process that a line of one number names.
# JAX starts no threads before it is used. A program ends as Python does, but
# leaves its modules alone: to take them apart, it would copy their memory.
_FORKS = """
import atexit, contextlib, faulthandler, gc, json, os, runpy, signal, sys
import threading
gc.set_threshold(50_000)
import matplotlib.pyplot, optax, scipy.optimize, scipy.stats
import transformers
from swiftspec_jax import *
with contextlib.suppress(ImportError):
  import fastapi, prometheus_client, uvicorn  # of the extra `serve`
transformers.AutoConfig.for_model('llama')  # imports what loading needs
gc.freeze()
while line := sys.stdin.readline():
  call = json.loads(line)
  if isinstance(call, int):
    _, status = os.waitpid(call, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
    continue
  if child := os.fork():
    print(child, flush=True)
    continue
  module, flags, streams, environment = call
  for number, path in enumerate(streams):
    os.dup2(os.open(path, os.O_RDWR), number)
  faulthandler.dump_traceback_later(300, exit=True)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  os.environ.clear()
  os.environ.update(environment)
  sys.argv = ['', *flags]
  sys.orig_argv = [sys.executable, '-m', module, *flags]
  try:
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  except SystemExit as end:
    if end.code and not isinstance(end.code, int):
      raise
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code or 0)
  break
"""


def module_of(program):
  """Returns the module of a command or of a program of `experiments`."""
  is_command = (ROOT / 'swiftspec_jax' / 'cli' / f'{program}.py').exists()
  return f'{"swiftspec_jax.cli" if is_command else "experiments"}.{program}'


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
  code = _LAUNCHER.format(module=module_of(program))
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


def _ask(call):
  """Returns the number that the process that forks answers."""
  _forks().stdin.write(json.dumps(call) + '\n')
  _forks().stdin.flush()
  return int(_forks().stdout.readline())


class Program:
  """A program that starts at once, and whose streams are files.

  What its modules read from the environment as they are imported, such as
  JAX's settings, is that of the first one; `start` takes the present one.

  Attributes:
    process_id: of the system.
  """

  def __init__(self, folder, program, *flags, text='', changes=()):
    """Starts it.

    Args:
      folder: gets the files of its streams.
      program: command, or program of `experiments`.
      *flags: of the program.
      text: standard input.
      changes: changes of the environment.
    """
    self._paths = [pathlib.Path(folder, x) for x in ('in', 'out', 'error')]
    for path in self._paths:
      path.write_text(text if path.name == 'in' else '')
    streams = [*map(str, self._paths)]
    variables = {**environment(), **dict(changes)}
    self.process_id = _ask([module_of(program), flags, streams, variables])
    self._status = None

  @property
  def output(self):
    """What it has written to standard output."""
    return self._paths[1].read_text(errors='replace')

  def send(self, number):
    """Sends a signal."""
    if self._status is None:
      os.kill(self.process_id, number)

  def finish(self):
    """Waits for the end; returns exit status, standard output and error."""
    if self._status is None:
      self._status = _ask(self.process_id)
    return self._status, self.output, self._paths[2].read_text(errors='replace')


@contextlib.contextmanager
def running(program, *flags, text=''):
  """Yields a `Program`, which ends with the block at the latest."""
  with tempfile.TemporaryDirectory() as folder:
    process = Program(folder, program, *flags, text=text)
    try:
      yield process
    finally:
      process.send(signal.SIGKILL)
      _, _, complaints = process.finish()
  assert 'Traceback' not in complaints, complaints


def run(program, *flags, text=''):
  """Runs a program to its end, with `text` as its input."""
  with running(program, *flags, text=text) as process:
    return process.finish()


def output_of(program, *flags, text=''):
  """Runs a program that must succeed; returns its standard output."""
  status, output, complaints = run(program, *flags, text=text)
  assert status == 0, complaints
  return output


def read_lines(directory, name='rows.jsonl'):
  """Returns the values of a file of JSON lines."""
  lines = (directory / name).read_text().splitlines()
  return [json.loads(line) for line in lines]


def read_summary(directory):
  return json.loads((directory / 'summary.json').read_text())


def write_prompts(folder, *texts):
  """Writes a file of prompts of the tasks a and b; returns its path."""
  path = folder / 'prompts.jsonl'
  lines = (
    {'question_id': i, 'task': 'ab'[i % 2], 'turns': [text]}
    for i, text in enumerate(texts)
  )
  path.write_text('\n'.join(map(json.dumps, lines)))
  return path


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
  deadline = time.monotonic() + 300  # of a machine that does other work, too
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)
