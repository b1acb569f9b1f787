"""Parts of the arrays of a checkpoint, read where a device needs them.

Tensors of a file are mapped into memory (`np.memmap`). As long as they are only
transposed, reshaped and put side by side, nothing is read.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from swiftspec_jax import errors

Index = tuple[slice, ...]  # one for each axis


@dataclasses.dataclass(frozen=True)
class Joined:
  """Arrays side by side, of which only what is indexed is read.

  Attributes:
    arrays: arrays as they lie in the file.
    axis: axis along which they lie one after another.
    order: axes of the result, as numbers of those of `arrays`.
  """

  arrays: Sequence[np.ndarray]
  axis: int
  order: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    shape = list(self.arrays[0].shape)
    shape[self.axis] = sum(array.shape[self.axis] for array in self.arrays)
    return tuple(shape[axis] for axis in self.order)

  def __getitem__(self, index: Index) -> np.ndarray:
    """Returns a part; all arrays are cut the same, along `axis`, too."""
    place = tuple(index[self.order.index(i)] for i in range(len(index)))
    # A view of a new array that has the file's order: numpy takes long to
    # transpose, JAX does not.
    parts = [np.asarray(array[place]) for array in self.arrays]
    return np.concatenate(parts, self.axis).transpose(self.order)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    return np.asarray(self[(slice(None),) * len(self.order)], dtype)


def check_shape(
  name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
  """Raises UserError if an array has another shape than the config says."""
  if found != expected:
    raise errors.UserError(
      f'{name} has shape {found}, the config says {expected}: weights and '
      'config do not belong together'
    )


def read(
  array: np.ndarray | Joined,
  shape: tuple[int, ...],
  dtype: jax.typing.DTypeLike,
  index: Index,
) -> np.ndarray:
  """Returns a part of an array, padded with zeros and converted.

  Args:
    array: any array; of one in a file only the part is read.
    shape: shape with padding, which is at the end of each axis.
    dtype: dtype of the result.
    index: part of the padded array.
  """
  part = array[index]
  # What devices share with the host must not change with the file.
  part = part.astype(dtype, copy=isinstance(part, np.memmap), subok=False)
  sizes = [
    len(range(size)[axis]) for axis, size in zip(index, shape, strict=True)
  ]
  padding = [
    (0, size - found) for size, found in zip(sizes, part.shape, strict=True)
  ]
  return np.pad(part, padding) if part.shape != tuple(sizes) else part
