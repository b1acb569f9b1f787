"""The child: runs the jobs of a section, and tells the parent what it does.

A fault of the device spoils all later work of its process. So a child tries the
device before each job, and ends if that fails; the parent starts another.
"""

import dataclasses
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp

from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Section, Settings
from swiftspec_jax.cli import program

_ERRORS = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  ImportError,
  LookupError,
  OSError,
  RuntimeError,
  TypeError,
  ValueError,
)


@dataclasses.dataclass(frozen=True)
class Planned:
  """How many jobs there are to do."""

  num_jobs: int


@dataclasses.dataclass(frozen=True)
class Started:
  """The job that runs from now on."""

  name: str
  shape: str
  limit: float


@dataclasses.dataclass(frozen=True)
class Finished:
  """There is nothing left to do."""


# A list has the rows of a job that has ended.
Message = Planned | Started | Finished | list[Row]


def main(
  connection: Connection,
  section: Section,
  settings: Settings,
  done: Collection[tuple[str, str]],
  log: str,
) -> None:
  """Runs in a process of its own.

  Args:
    connection: connection that the messages go to.
    section: section to be measured.
    settings: settings of the report.
    done: keys of jobs that are left out.
    log: path of the file for all that is printed.
  """
  os.setpgrp()  # so that the programs that it starts end with it
  # They get Ctrl-C from here, which a job in the background would ignore.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  with open(log, 'ab', buffering=0) as file:
    for stream in (1, 2):
      os.dup2(file.fileno(), stream)
  program.set_up()
  work(section, settings, done, connection.send)


def work(
  section: Section,
  settings: Settings,
  done: Collection[tuple[str, str]],
  send: Callable[[Message], None],
) -> None:
  """Runs the jobs that are not done; raises if the device is lost.

  Args:
    section: section to be measured.
    settings: settings of the report.
    done: keys of jobs that are left out.
    send: function that sends a `Message`.
  """
  device = jax.devices()[0]
  if settings.tiny is None:
    is_cpu = device.platform == 'cpu'
    settings = dataclasses.replace(settings, tiny=is_cpu)
  jobs = [job for job in section.jobs(settings) if job.key not in done]
  send(Planned(len(jobs)))
  for job in jobs:
    # A fault of the job before must not be held against this one.
    jax.block_until_ready(jnp.ones(8) + 1)
    send(Started(job.name, job.shape, job.limit))
    start = time.perf_counter()
    rows = _attempt(job)
    seconds = time.perf_counter() - start
    send(
      [
        dataclasses.replace(
          row,
          section=section.name,
          name=row.name or job.name,
          shape=row.shape or job.shape,
          job_seconds=seconds / len(rows),
          device=device.device_kind,
        )
        for row in rows
      ]
    )
  send(Finished())


def _attempt(job: Job) -> list[Row]:
  try:
    return list(job.run())
  except _ERRORS as error:
    traceback.print_exc()
    reason = ' '.join(f'{type(error).__name__}: {error}'.split())
    return [Row(status=_status_of(job, error), reason=reason[:300])]


def _status_of(job: Job, error: BaseException) -> str:
  if isinstance(error.__cause__ or error, ModuleNotFoundError):
    return rows_lib.NO_PACKAGE
  return rows_lib.REFUSED if job.is_baseline else rows_lib.FAILED
