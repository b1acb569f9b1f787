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

    while True:
      done = {row.key for row in rows if row.section == section.name}
      with _child(section, settings) as child:
        is_complete = _follow(child, section, done, turn_end, end, add, bar)
      if is_complete is not None:
        return is_complete


def _follow(
  child: '_Child', section, done, turn_end, end, add, bar
) -> bool | None:
  """Has a child run what is not done.

  Returns:
    Whether the section is complete; None if another child has to go on.
  """
  key, limit, left = ('start', ''), _START_SECONDS, []
  try:
    left += [x for x in child.receive(limit, end) if x[0] not in done]
    bar.reset(len(left))
    while left:
      key, limit = left.pop(0)
      bar.set_postfix_str(' '.join(key)[:60])
      child.send(key)
      new, is_sound = child.receive(limit, end)
      add(new)
      if left and (time.monotonic() > turn_end or not is_sound):
        return None if not is_sound else False
    return True
  except (EOFError, ConnectionError, TimeoutError) as error:
    is_late = isinstance(error, TimeoutError)
    if is_late and time.monotonic() >= end:
      return False
    row = Row(
      section=section.name,
      name=key[0],
      shape=key[1],
      status=rows_lib.TIMED_OUT if is_late else rows_lib.CRASHED,
      reason=f'{limit:.0f} s' if is_late else child.last_words(),
      job_seconds=child.seconds(),
    )
    add([row])
    if key[0] == 'start':
      return False
    return None if left else True


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

  def send(self, message: Any) -> None:
    """Sends a message."""
    self._connection.send(message)

  def receive(self, limit: float, end: float) -> Any:
    """Returns the next message, if it comes in `limit` seconds and before end.

    Raises:
      EOFError: the process has ended.
      TimeoutError: there was none in time.
    """
    if not self._connection.poll(max(min(limit, end - time.monotonic()), 0.0)):
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
def _child(section, settings) -> Iterator[_Child]:
  """Starts a child; it and all its children end with the block."""
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  with tempfile.NamedTemporaryFile() as log, ours:
    process = context.Process(
      target=worker.main, args=(theirs, section, settings, log.name)
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
