"""Reads `pytorch_model.bin` without torch.

Such a file is a zip archive of a pickle, which says what the tensors are, and
of their numbers. A pickle may name any function to be called; here only the few
are known that make tensors, and none of them is torch's.
"""

import collections
import math
import pathlib
import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from swiftspec_jax import errors

_NAME = 'pytorch_model.bin'
_DTYPES = {
  'FloatStorage': np.float32,
  'HalfStorage': np.float16,
  'BFloat16Storage': ml_dtypes.bfloat16,
  'DoubleStorage': np.float64,
  'LongStorage': np.int64,
  'IntStorage': np.int32,
  'BoolStorage': np.bool_,
}


def is_in(directory: pathlib.Path) -> bool:
  """Whether a directory has such a file."""
  return (directory / _NAME).exists()


def read(directory: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the tensors by name.

  Raises:
    UserError: the file is cut short, or holds something other than tensors.
  """
  path = directory / _NAME
  broken = f'{path} is cut short or holds more than tensors: '
  kinds = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
  )
  with (
    errors.explained(broken, kinds, '; convert it to safetensors'),
    zipfile.ZipFile(path) as archive,
  ):
    (pickled,) = (
      name for name in archive.namelist() if name.endswith('/data.pkl')
    )
    root = pickled.removesuffix('data.pkl') + 'data/'
    with archive.open(pickled) as file:
      found = _Unpickler(file, archive, root).load()
  if not isinstance(found, dict) or not all(
    isinstance(tensor, np.ndarray) for tensor in found.values()
  ):
    raise errors.UserError(
      f'{path} is no table of tensors; convert it to safetensors'
    )
  return dict(found)


class _Unpickler(pickle.Unpickler):
  """Makes numpy arrays of tensors, and knows nothing else."""

  def __init__(self, file: Any, archive: zipfile.ZipFile, root: str):
    super().__init__(file)
    self._archive, self._root = archive, root

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) == ('collections', 'OrderedDict'):
      return collections.OrderedDict
    if (module, name) == ('torch._utils', '_rebuild_tensor_v2'):
      return _tensor
    if module == 'torch' and name in _DTYPES:
      return np.dtype(_DTYPES[name])
    raise pickle.UnpicklingError(f'it names {module}.{name}')

  def persistent_load(self, pid: tuple) -> np.ndarray:
    _, dtype, key, _, num_elements = pid
    numbers = np.frombuffer(self._archive.read(self._root + key), dtype)
    return numbers[:num_elements]


def _tensor(storage, offset, shape, strides, *_):
  """Returns the tensor of some of the stored numbers."""
  steps = list(zip(shape, strides, strict=True))
  last = offset + sum((size - 1) * stride for size, stride in steps)
  is_inside = offset >= 0 and last < len(storage)
  if min((0, *shape, *strides)) < 0 or (math.prod(shape) and not is_inside):
    raise ValueError('a tensor lies outside its numbers')
  return np.lib.stride_tricks.as_strided(
    storage[offset:],
    shape,
    [stride * storage.itemsize for stride in strides],
    writeable=False,
  )
