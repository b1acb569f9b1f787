"""The child: runs the jobs of a section that the parent asks for.

A fault of the device spoils all later work of its process. So a child tries the
device after each job, and says if that fails; the parent starts another.
"""

import contextlib
import dataclasses
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp

from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Section, Settings
from swiftspec_jax.cli import program


def main(
  connection: Connection, section: Section, settings: Settings, log: str
) -> None:
  """Runs in a process of its own.

  Sends keys and limits of all jobs. Then a key is answered by the job's rows,
  and whether the device still works.

  Args:
    connection: connection to the parent.
    section: section to be measured.
    settings: settings of the report.
    log: path of the file for all that is printed.
  """
  os.setpgrp()  # so that the programs that it starts end with it
  # They get Ctrl-C from here, which a job in the background would ignore.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  with open(log, 'ab', buffering=0) as file:
    for stream in (1, 2):
      os.dup2(file.fileno(), stream)
  program.set_up()
  jobs = {job.key: job for job in section.jobs(settings)}
  connection.send([(key, job.limit) for key, job in jobs.items()])
  with contextlib.suppress(EOFError):
    while True:
      rows = run(section, jobs[connection.recv()])
      connection.send((rows, _device_works()))


def run(section: Section, job: Job) -> list[Row]:
  """Returns the rows of a job; an error is a row, too."""
  start = time.perf_counter()
  rows = _attempt(job)
  seconds = time.perf_counter() - start
  return [
    dataclasses.replace(
      row,
      section=section.name,
      name=row.name or job.name,
      shape=row.shape or job.shape,
      job_seconds=seconds / len(rows),
      device=jax.devices()[0].device_kind,
    )
    for row in rows
  ]


def _device_works() -> bool:
  try:
    jax.block_until_ready(jnp.ones(8) + 1)
  except RuntimeError:
    traceback.print_exc()
    return False
  return True


def _attempt(job: Job) -> list[Row]:
  try:
    return list(job.run())
  # Any fault of a job is a row, and the others go on.
  except Exception as error:  # noqa: BLE001
    traceback.print_exc()
    reason = ' '.join(f'{type(error).__name__}: {error}'.split())
    return [Row(status=_status_of(job, error), reason=reason[:300])]


def _status_of(job: Job, error: BaseException) -> str:
  if isinstance(error.__cause__ or error, ModuleNotFoundError):
    return rows_lib.NO_PACKAGE
  return rows_lib.REFUSED if job.is_baseline else rows_lib.FAILED
