"""Compiles one program and says what came of it."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from experiments.aot import launches
from experiments.aot.targets import Target

_COMPILERS = ('jax', 'jaxlib', 'libtpu', 'nvidia-')  # begin their packages
# What the TPU compiler says of programs larger than the device's memory. That
# a kernel asks for too much VMEM is a refusal.
_COLLECTIVE = re.compile(
  r' = (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|'
  r'reduce-scatter|collective-broadcast|ragged-all-to-all)(?:-start)?\('
)
_ARRAY = re.compile(r'[a-z]+(\d+)\w*\[([\d,]*)\]')  # bits of an element, shape
_TOO_LARGE = ('memory on HBM', 'memory in memory space hbm')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A program to compile.

  Attributes:
    name: name of the kernel or step.
    shape: shape in words.
    target: device to compile for.
    lower: function that returns the lowered program.
  """

  name: str
  shape: str
  target: Target
  lower: Callable[[], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A line of the table.

  Attributes:
    name: name of the kernel or step.
    topology: topology that it was compiled for.
    shape: shape in words.
    status: 'fits', 'too large' (for the device's memory) or 'refused' by the
      compiler.
    bytes_per_device: arguments, results and temporaries at once.
    temp_bytes: bytes of temporaries among them.
    code_bytes: size of the code, where the compiler says.
    collective_bytes: size of the largest array that devices exchange.
    optimal_seconds: the compiler's own lower bound, where it gives one. It is
      no measurement.
    launches: kernels that a GPU program starts, see `launches.by_loop`; None
      for TPUs.
    compile_seconds: wall time, on the machine that compiled.
    message: message of the compiler.
    fingerprint: fingerprint of the program, the device and the compilers'
      versions.
  """

  name: str
  topology: str
  shape: str
  status: str
  bytes_per_device: int | None = None
  temp_bytes: int | None = None
  code_bytes: int | None = None
  collective_bytes: int | None = None
  optimal_seconds: float | None = None
  launches: dict[str, dict[str, int]] | None = None
  compile_seconds: float | None = None
  message: str = ''
  fingerprint: str = ''


def compile_job(job: Job, known: Mapping[str, Row] | None = None) -> Row:
  """Returns the row of a job; a refusal is a row, too.

  Args:
    job: program to compile.
    known: rows by their fingerprints, which need no compiler again.
  """
  row = Row(
    name=job.name, topology=job.target.topology, shape=job.shape, status='fits'
  )
  start = time.perf_counter()
  try:
    lowered = job.lower()
    row = dataclasses.replace(row, fingerprint=_fingerprint(job, lowered))
    if known and row.fingerprint in known:
      return known[row.fingerprint]
    compiled = lowered.compile()
  # Compilers have errors of their own; none may end the table.
  except Exception as error:  # noqa: BLE001
    message = ' '.join(str(error).split())[:600]
    return dataclasses.replace(row, status=failure(str(error)), message=message)
  seconds = time.perf_counter() - start
  facts = _facts(compiled)
  if job.target.platform == 'cuda':
    facts['launches'] = launches.by_loop(compiled.as_text())
  fits = facts['bytes_per_device'] <= job.target.bytes_per_device
  return dataclasses.replace(
    row,
    status='fits' if fits else 'too large',
    compile_seconds=round(seconds, 2),
    **facts,
  )


def failure(message: str) -> str:
  """Returns the status of a program for which an error was raised."""
  is_large = any(part in message for part in _TOO_LARGE)
  return 'too large' if is_large else 'refused'


@functools.cache
def _versions() -> list[str]:
  return sorted(
    f'{distribution.name} {distribution.version}'
    for distribution in importlib.metadata.distributions()
    if distribution.name.startswith(_COMPILERS)
  )


def _fingerprint(job: Job, lowered: jax.stages.Lowered) -> str:
  # The same program can have several names.
  parts = [job.name, job.shape, job.target.topology, *_versions()]
  text = '\n'.join([*parts, lowered.as_text()])
  return hashlib.sha256(text.encode()).hexdigest()


def _facts(compiled: jax.stages.Compiled) -> dict[str, Any]:
  memory = compiled.memory_analysis()
  cost = compiled.cost_analysis() or {}
  total = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )
  optimal = cost.get('optimal_seconds', 0)
  return {
    'bytes_per_device': total,
    'temp_bytes': memory.temp_size_in_bytes,
    'code_bytes': memory.generated_code_size_in_bytes or None,
    'collective_bytes': largest_collective(compiled.as_text()),
    # Negative where the compiler does not know.
    'optimal_seconds': optimal if optimal > 0 else None,
  }


def largest_collective(program: str) -> int:
  """Returns the bytes of the largest array of any collective, 0 if none."""
  arrays = [
    array
    for kind in _COLLECTIVE.findall(program)
    for array in _ARRAY.findall(kind)
  ]
  sizes = [
    math.prod(map(int, filter(None, shape.split(',')))) * int(bits) // 8
    for bits, shape in arrays
  ]
  return max(sizes, default=0)
