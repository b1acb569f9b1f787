"""Files of tensors that are mapped into memory, and read where they are used.

The library that writes them reads whole tensors for numpy, and not all dtypes.
"""

import functools
import json
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from swiftspec_jax import errors
from swiftspec_jax.runtime import atomic_file

ERRORS = OSError, safetensors.SafetensorError  # of a file
_DTYPES = {
  'BOOL': np.bool_,
  **{f'I{8 * n}': np.dtype(f'i{n}') for n in (1, 2, 4, 8)},
  **{f'U{8 * n}': np.dtype(f'u{n}') for n in (1, 2, 4, 8)},
  **{f'F{8 * n}': np.dtype(f'f{n}') for n in (2, 4, 8)},
  'BF16': ml_dtypes.bfloat16,
  'F8_E4M3': ml_dtypes.float8_e4m3fn,
  'F8_E8M0': ml_dtypes.float8_e8m0fnu,
}


def write(
  path: pathlib.Path,
  tensors: Mapping[str, np.ndarray],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes a file atomically, whatever the strides of its tensors.

  Raises:
    OSError, SafetensorError: it cannot be written.
  """
  # The library stores their memory as it is.
  tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
  with atomic_file.replacing(path) as partial:
    safetensors_numpy.save_file(tensors, partial, metadata)


def tensors_of(path: pathlib.Path) -> dict[str, Callable[[], np.memmap]]:
  """Returns by name what maps a tensor, as long as its array is used.

  Raises:
    UserError: the file is missing or cut short; or later, what maps a tensor
      does not know its dtype.
  """
  broken = f'{path} is missing or cut short: '
  with errors.explained(broken, ERRORS, '; download it again'):
    safetensors.safe_open(path, framework='numpy')  # checks it
  with path.open('rb') as file:
    (size,) = struct.unpack('<Q', file.read(8))
    header = json.loads(file.read(size))
  return {
    name: functools.partial(_map, path, name, entry, 8 + size)
    for name, entry in header.items()
    if name != '__metadata__'
  }


def _map(
  path: pathlib.Path, name: str, entry: Mapping[str, Any], start: int
) -> np.memmap:
  dtype, (offset, _) = entry['dtype'], entry['data_offsets']
  if dtype not in _DTYPES:
    raise errors.UserError(
      f'{path}: tensor {name} has the dtype {dtype}, which is not supported; '
      'take another checkpoint'
    )
  return np.memmap(
    path,
    dtype=_DTYPES[dtype],
    mode='r',
    offset=start + offset,
    shape=tuple(entry['shape']),
  )
