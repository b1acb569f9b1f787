"""The parent: starts children, ends those that hang, keeps their rows."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tqdm

from experiments.accelerator import rows as rows_lib
from experiments.accelerator import worker
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Section, Settings

_START_SECONDS = 180.0  # of a child, until its first job
_NUM_LOG_BYTES = 2000


def run_section(
  section: Section,
  settings: Settings,
  rows: list[Row],
  turn_end: float,
  end: float,
) -> bool:
  """Adds rows of a section, to the list and to the file.

  A job at which a child ends early or hangs gets a row that says so, and
  another child goes on after it.

  Args:
    section: section to be measured.
    settings: settings of the report.
    rows: rows of the report so far.
    turn_end: time after which no other job begins, in seconds of
      `time.monotonic`.
    end: time at which to stop, in the same seconds.

  Returns:
    Whether the section has all its rows.
  """
  with tqdm.tqdm(desc=section.name, unit='job', disable=None) as bar:

    def add(new: Sequence[Row]) -> None:
      rows_lib.append(settings.directory, new)
      rows.extend(new)
      bar.update()
      for row in new:
        tqdm.tqdm.write(_line(row), file=sys.stderr)

    is_complete = None
    while is_complete is None:
      done = {row.key for row in rows if row.section == section.name}
      with _child(section, settings, done) as child:
        is_complete = _follow(child, section, turn_end, end, add, bar)
  return is_complete


def _follow(child: '_Child', section, turn_end, end, add, bar) -> bool | None:
  """Hands on the rows of a child.

  Returns:
    Whether the section is complete; None if another child has to go on.
  """
  job, num_started, num_jobs = None, 0, 0
  limit = _START_SECONDS
  while True:
    left = end - time.monotonic()
    try:
      message = child.receive(min(limit, left))
    except (EOFError, TimeoutError) as error:
      is_late = isinstance(error, TimeoutError)
      if is_late and left <= limit:
        return False
      if job is not None or not num_started:
        key = ('start', '') if job is None else (job.name, job.shape)
        status = rows_lib.TIMED_OUT if is_late else rows_lib.CRASHED
        reason = f'{limit:.0f} s' if is_late else child.last_words()
        add([_lost(section, *key, status, reason, child.seconds())])
      if num_started in (0, num_jobs):
        return num_started > 0
      return None
    if isinstance(message, worker.Finished):
      return True
    if isinstance(message, worker.Planned):
      num_jobs = message.num_jobs
      bar.reset(num_jobs)
    elif isinstance(message, worker.Started):
      job, limit = message, message.limit
      num_started += 1
      bar.set_postfix_str(f'{job.name} {job.shape}'[:60])
    else:
      add(message)
      job, limit = None, _START_SECONDS
      if time.monotonic() > turn_end:
        return num_started == num_jobs


def _lost(section, name, shape, status, reason, seconds) -> Row:
  return Row(
    section=section.name,
    name=name,
    shape=shape,
    status=status,
    reason=reason,
    job_seconds=seconds,
  )


def _line(row: Row) -> str:
  seconds = '' if row.seconds is None else f'{row.seconds * 1e3:.4g} ms'
  return f'{row.section}: {row.name} {row.shape}: {row.status} {seconds}'


class _Child:
  """A process, its messages and what it prints."""

  def __init__(self, process, connection, log):
    self._process = process
    self._connection = connection
    self._log = log
    self._heard = time.monotonic()

  def receive(self, seconds: float) -> Any:
    """Returns the next message.

    Raises:
      EOFError: the process has ended.
      TimeoutError: there was none in time.
    """
    if not self._connection.poll(max(seconds, 0.0)):
      raise TimeoutError
    message = self._connection.recv()
    self._heard = time.monotonic()
    return message

  def seconds(self) -> float:
    """Returns the time since the last message."""
    return time.monotonic() - self._heard

  def last_words(self) -> str:
    """Returns how the process ended, and the last line that it printed."""
    self._process.join()
    code = self._process.exitcode
    how = f'exit status {code}'
    if code < 0:
      how = signal.Signals(-code).name
    self._log.seek(0, os.SEEK_END)
    self._log.seek(max(0, self._log.tell() - _NUM_LOG_BYTES))
    text = self._log.read().decode(errors='replace')
    tqdm.tqdm.write(text, file=sys.stderr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ': '.join([how, *lines[-1:]])[:300]


@contextlib.contextmanager
def _child(section, settings, done) -> Iterator[_Child]:
  """Starts a child; it and all its children end with the block."""
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe(duplex=False)
  with tempfile.NamedTemporaryFile() as log, ours:
    process = context.Process(
      target=worker.main, args=(theirs, section, settings, done, log.name)
    )
    process.start()
    theirs.close()
    try:
      yield _Child(process, ours, log)
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.kill()
      process.join()
