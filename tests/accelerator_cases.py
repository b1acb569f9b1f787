"""Jobs that go well, are refused, fail, crash and hang."""

import os
import signal
import time

from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Section

SECTION = Section(
  name='cases', title='Cases', module=__name__, seconds=10, note=''
)


def refuse():
  raise NotImplementedError('no such shape')


def fail():
  raise RuntimeError('the device is lost')


def crash():
  os.kill(os.getpid(), signal.SIGSEGV)


def hang():
  time.sleep(60)


def measure():
  return [Row(seconds=2.0), Row(name='more', shape='other')]


RUNS = {
  'measure': measure,
  'refuse': refuse,
  'fail': fail,
  'crash': crash,
  'behind': measure,
  'hang': hang,
}


def jobs(settings):
  """Returns the jobs that the model's name lists."""
  return [
    Job(name=name, shape='small', run=RUNS[name], limit=0.5)
    for name in settings.model.split(',')
  ]
