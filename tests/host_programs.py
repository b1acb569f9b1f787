"""Runs a program of `experiments` in several processes that join each other."""

import pathlib
import signal

import programs

from swiftspec_jax.runtime import connections


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
    places = (
      '--distributed',
      f'--coordinator_address=localhost:{connections.free_port()}',
      f'--num_processes={len(environments)}',
    )
    self._programs = []
    for i, changes in enumerate(environments):
      streams = pathlib.Path(folder, f'process-{i}')
      streams.mkdir(exist_ok=True)
      each = (*places, f'--process_id={i}', *flags)
      self._programs.append(
        programs.Program(streams, program, *each, changes=changes)
      )
    self.process_ids = [each.process_id for each in self._programs]

  def output(self, i):
    """What process `i` has written to standard output."""
    return self._programs[i].output

  def kill(self):
    """Does what `finish` does, but ends those that still run."""
    for each in self._programs:
      each.send(signal.SIGKILL)
    return self.finish()

  def finish(self):
    """Waits for all; returns exit status, output and errors of each."""
    return [each.finish() for each in self._programs]


def run(folder, program, *flags, count):
  """Runs `count` processes to their ends and returns their outputs."""
  together = Together(folder, program, *flags, environments=[{}] * count)
  results = together.finish()
  assert all(status == 0 for status, _, _ in results), results
  return [output for _, output, _ in results]
