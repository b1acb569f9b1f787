"""Jobs that go well, are refused, miss a package, fail, crash and hang."""

import os
import signal
import tempfile
import time

import swiftspec_jax as ss
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Section

SECTION = Section(
  name='cases', title='Cases', module=__name__, seconds=10, note=''
)


def refuse():
  raise ValueError('no such shape')


def read_gguf():
  with tempfile.NamedTemporaryFile(suffix='.gguf') as file:
    ss.load(file.name)


def quantize():
  import qwix  # noqa: F401


def fail():
  raise RuntimeError('out of memory')


def crash():
  os.kill(os.getpid(), signal.SIGSEGV)


def hang():
  time.sleep(60)


def measure():
  return [Row(seconds=2.0), Row(name='more', shape='other')]


RUNS = {
  'measure': measure,
  'refuse': refuse,
  'read_gguf': read_gguf,
  'quantize': quantize,
  'fail': fail,
  'crash': crash,
  'after': measure,
  'hang': hang,
}


def jobs(settings):
  """Returns the jobs that the model's name lists."""
  return [
    Job(
      name=name,
      shape='small',
      run=RUNS[name],
      limit=0.5 if name == 'hang' else 60.0,
      is_baseline=name == 'refuse',
    )
    for name in settings.model.split(',')
  ]
