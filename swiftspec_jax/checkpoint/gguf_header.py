"""Reads what a .gguf file holds: metadata, and where each tensor lies.

The reader of the gguf package makes several arrays for every token of the
vocabulary, which takes seconds; this one takes a tenth of that.
"""

import dataclasses
import math
import mmap
import pathlib
import re
import struct
from typing import Any

import gguf
import numpy as np

from swiftspec_jax import errors

_STRING, _ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
_ALIGNMENT = 64  # of memory that XLA takes without a copy
_SCALARS = gguf.GGUFReader.gguf_scalar_to_np


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor as it lies in the file.

  Attributes:
    kind: format in which the numbers are stored.
    shape: sizes of the axes; of the last one in bytes.
    aligned: u8[start + size] bytes of the mapped file, a view that begins at a
      whole line of the cache.
  """

  kind: gguf.GGMLQuantizationType
  shape: tuple[int, ...]
  aligned: np.ndarray

  @property
  def start(self) -> int:
    """Bytes before the tensor."""
    return len(self.aligned) - math.prod(self.shape)

  @property
  def data(self) -> np.ndarray:
    """Its bytes u8[..., bytes of a row], a view of the mapped file."""
    return self.aligned[self.start :].reshape(self.shape)


_PIECE = re.compile(r'-(\d{5})-of-(\d{5})\.gguf')


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """Returns metadata as plain Python values, and tensors by name.

  Of a file in pieces (`llama-gguf-split`) any piece stands for all of them.

  Raises:
    UserError: a file is missing, no GGUF file, or cut short.
  """
  found = _PIECE.search(path.name)
  if found is None:
    return _read(path)
  metadata, tensors = dict[str, Any](), dict[str, Tensor]()
  for number in range(1, int(found[2]) + 1):
    name = f'{path.name[: found.start()]}-{number:05}-of-{found[2]}.gguf'
    of_piece, more = _read(path.with_name(name))
    metadata, tensors = {**of_piece, **metadata}, {**tensors, **more}
  return metadata, tensors


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
  broken = f'{path} is not a complete GGUF file: '
  kinds = (OSError, KeyError, ValueError, struct.error)
  with errors.explained(broken, kinds, '; download it again'):
    with path.open('rb') as file:
      buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _Header(buffer).parse()


class _Header:
  """A cursor over the mapped file."""

  def __init__(self, buffer: mmap.mmap):
    self._buffer = buffer
    self._offset = 0

  def parse(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
    magic, version = self._unpack('<4sI')
    if magic != b'GGUF':
      raise ValueError(f'it starts with {magic!r}')
    if version not in (2, 3):
      raise ValueError(f'its version is {version}, supported: 2, 3')
    num_tensors, num_values = self._unpack('<QQ')
    metadata = {
      self._string(): self._value(self._unpack('<I')[0])
      for _ in range(num_values)
    }
    places = [self._place() for _ in range(num_tensors)]
    alignment = metadata.get('general.alignment', gguf.GGUF_DEFAULT_ALIGNMENT)
    start = math.ceil(self._offset / alignment) * alignment
    tensors = {
      name: self._tensor(name, kind, shape, start + offset)
      for name, shape, kind, offset in places
    }
    return metadata, tensors

  def _unpack(self, layout: str) -> tuple:
    values = struct.unpack_from(layout, self._buffer, self._offset)
    self._offset += struct.calcsize(layout)
    return values

  def _string(self) -> str:
    return self._strings(1)[0]

  def _value(self, kind: int) -> Any:
    if kind == _STRING:
      return self._string()
    if kind != _ARRAY:
      return self._numbers(kind, 1)[0]
    kind, length = self._unpack('<IQ')
    if kind == _STRING:
      return self._strings(length)
    return self._numbers(kind, length)

  def _strings(self, count: int) -> list[str]:
    # A vocabulary and its merges can be 300,000, so the loop calls little.
    buffer, offset, strings = self._buffer, self._offset, []
    length_at = struct.Struct('<Q').unpack_from
    for _ in range(count):
      start = offset + 8
      offset = start + length_at(buffer, offset)[0]
      strings.append(str(buffer[start:offset], 'utf-8'))
    self._offset = offset
    if offset > len(buffer):
      raise ValueError('it ends inside its metadata')
    return strings

  def _numbers(self, kind: int, count: int) -> list:
    dtype = np.dtype(_SCALARS[gguf.GGUFValueType(kind)])
    start, self._offset = self._offset, self._offset + count * dtype.itemsize
    if self._offset > len(self._buffer):
      raise ValueError('it ends inside its metadata')
    return np.frombuffer(self._buffer, dtype, count, start).tolist()

  def _place(self) -> tuple[str, tuple[int, ...], int, int]:
    name = self._string()
    (num_axes,) = self._unpack('<I')
    *shape, kind, offset = self._unpack(f'<{num_axes}QIQ')
    return name, tuple(reversed(shape)), kind, offset

  def _tensor(
    self, name: str, kind: int, shape: tuple[int, ...], start: int
  ) -> Tensor:
    kind = gguf.GGMLQuantizationType(kind)
    shape = gguf.quant_shape_to_byte_shape(shape, kind)
    size = math.prod(shape)
    if start + size > len(self._buffer):
      raise ValueError(f'it ends before tensor {name} does')
    before = start % _ALIGNMENT
    aligned = np.frombuffer(
      self._buffer, np.uint8, before + size, start - before
    )
    return Tensor(kind=kind, shape=shape, aligned=aligned)
