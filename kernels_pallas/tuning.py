"""Tiles that were measured, which kernels take instead of their defaults.

`python -m experiments.kernels tune` writes them to a file, which is read where
the environment variable `SWIFTSPEC_TILES` names it. An entry holds for one kind
of device and exactly its shapes; where there is none, the defaults stay.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from jax.sharding import Sharding

from kernels_pallas import dispatch, registry

VARIABLE = 'SWIFTSPEC_TILES'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """The best tiles of a kernel for one kind of device and its shapes.

  Attributes:
    kernel: name of the kernel.
    implementation: one of `dispatch.IMPLEMENTATIONS` that is a kernel.
    device_kind: JAX's name of the device's kind.
    shapes: shapes of the arguments on a device, from `shapes_of`.
    config: the `Config` of the implementation.
    seconds: seconds of a call.
    default_seconds: seconds of a call with the default tiles.
  """

  kernel: str
  implementation: str
  device_kind: str
  shapes: str
  config: Any
  seconds: float
  default_seconds: float

  @property
  def key(self) -> tuple[str, ...]:
    """What it is looked up by."""
    return (self.kernel, self.implementation, self.device_kind, self.shapes)


def config_class(kernel: str, implementation: str) -> type:
  """Returns the class of a kernel's tiles.

  Raises:
    ValueError: there is no such kernel.
  """
  if (
    kernel not in registry.PACKAGES
    or implementation not in registry.implementations(kernel)
    or not hasattr(registry.module(kernel, implementation), 'Config')
  ):
    raise ValueError(f'there are no tiles of {implementation} for {kernel!r}')
  return registry.module(kernel, implementation).Config


def shapes_of(arrays: Any) -> str:
  """Returns dtypes and shapes of a pytree in words; equal ones are counted."""
  leaves = [f'{x.dtype}{list(x.shape)}' for x in jax.tree.leaves(arrays)]
  groups = [
    (len(list(group)), leaf) for leaf, group in itertools.groupby(leaves)
  ]
  return ', '.join(
    leaf if count == 1 else f'{count} x {leaf}' for count, leaf in groups
  )


def tuned(
  kernel: str,
  implementation: str,
  call: Callable[..., Any],
  sharding: Sharding | None = None,
) -> Callable[..., Any]:
  """Returns `call` with the tiles that were measured for its arguments.

  They are looked up when it is traced.

  Args:
    kernel: name of the kernel.
    implementation: name of the implementation; the reference has no tiles.
    call: function of arrays that has an option `config`.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.
  """
  device_kind = dispatch.device_of(sharding).device_kind

  def call_with_tiles(*arrays):
    config = measured(kernel, implementation, device_kind, arrays)
    if config is None:
      return call(*arrays)
    logging.info('%s of %s: %s', kernel, shapes_of(arrays), config)
    return call(*arrays, config=config)

  return call_with_tiles


def measured(
  kernel: str, implementation: str, device_kind: str, arrays: Any
) -> Any | None:
  """Returns the tiles that were measured for arguments; None is the defaults.

  Args:
    kernel: name of the kernel.
    implementation: one of `dispatch.IMPLEMENTATIONS` that is a kernel.
    device_kind: JAX's name of the device's kind.
    arrays: pytree of the arguments, which may be abstract.
  """
  key = (kernel, implementation, device_kind, shapes_of(arrays))
  entry = _known(os.environ.get(VARIABLE)).get(key)
  return entry and entry.config


@functools.cache
def _known(path: str | None) -> dict[tuple[str, ...], Entry]:
  entries = read(pathlib.Path(path)) if path else []
  return {entry.key: entry for entry in entries}


def check_variable() -> None:
  """Raises ValueError if the file that `SWIFTSPEC_TILES` names is no good."""
  path = os.environ.get(VARIABLE)
  try:
    _known(path)
  except (OSError, ValueError) as error:
    raise ValueError(f'{VARIABLE}={path} cannot be used: {error}') from error


def read(path: pathlib.Path) -> list[Entry]:
  """Returns the entries of a file.

  Raises:
    OSError: it cannot be read.
    ValueError: the file is no list of entries, or tiles are not valid; the
      message names the entry.
  """
  try:
    rows = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f'it is not JSON: {error}') from error
  if not isinstance(rows, list):
    raise ValueError('it is no list of entries')
  return [_entry(i, row) for i, row in enumerate(rows)]


def _entry(index, row) -> Entry:
  names = [field.name for field in dataclasses.fields(Entry)]
  if not isinstance(row, dict) or sorted(row) != sorted(names):
    raise ValueError(f'entry {index} must have exactly {", ".join(names)}')
  try:
    make = config_class(row['kernel'], row['implementation'])
    return Entry(**{**row, 'config': make(**row['config'])})
  except (TypeError, ValueError) as error:
    raise ValueError(f'entry {index}: {error}') from error


def dump(entries: list[Entry]) -> str:
  """Returns the text of a file of these entries."""
  rows = [dataclasses.asdict(entry) for entry in entries]
  return json.dumps(rows, indent=2) + '\n'
