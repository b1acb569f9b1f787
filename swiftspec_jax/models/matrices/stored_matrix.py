"""Matrices of few bits as checkpoints have them.

Legend: X experts, P parts, K inputs, N outputs, C groups of inputs.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from swiftspec_jax.runtime import sharding as sharding_lib


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
  """A matrix as a checkpoint has it, on the host and without padding.

  Attributes:
    values: int8, int8 from -8 to 7 for int4 and the bits of MXFP4, or
      float8_e4m3fn: [N, K] as it is read, [K, *outputs] as it is placed, and
      [X, K, N] of a mixture of experts.
    scales: f32 with C for K, or the bits of MXFP4, uint8.
    offsets: f32 as scales; None is nothing.
  """

  values: np.ndarray
  scales: np.ndarray
  offsets: np.ndarray | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @classmethod
  def join(
    cls,
    join: Callable[[Sequence[np.ndarray]], np.ndarray],
    matrices: Sequence['StoredMatrix'],
  ) -> 'StoredMatrix':
    """Returns what `join` makes of each of the arrays of some matrices."""
    fields = zip(*(matrix._arrays for matrix in matrices), strict=True)
    return cls(*(x[0] if x[0] is None else join(x) for x in fields))

  def __getitem__(self, index) -> 'StoredMatrix':
    """Returns the matrix of some outputs, by an index `[..., outputs]`."""
    return StoredMatrix(*(x if x is None else x[index] for x in self._arrays))

  @property
  def _arrays(self):
    return self.values, self.scales, self.offsets

  def by_parts(self, num_parts: int) -> 'StoredMatrix':
    """Returns the matrix [K, *outputs] as [P, K, N]."""

    def split(arrays):
      array = arrays[0].reshape(len(arrays[0]), num_parts, -1)
      return np.moveaxis(array, 1, 0)

    return self.join(split, [self])

  def is_grouped(self, weight_dtype: str) -> bool:
    """Whether groups of inputs have scales of their own.

    Those of int4 always do, as its kernels have them.
    """
    return weight_dtype == 'int4' or self.scales.shape[1] > 1

  def put(
    self,
    shape: tuple[int, int],
    group_size: int | None,
    shardings: tuple[NamedSharding, NamedSharding],
    dtype: jax.typing.DTypeLike,
  ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns those of [P, K, N] on devices, padded with zeros.

    Args:
      shape: K and N with padding.
      group_size: number of inputs that no group may have more of, as they may
        be those of two devices; None where all inputs share a scale.
      shardings: shardings of values, and of scales and offsets.
      dtype: dtype of the values.
    """
    num_inputs, num_outputs = shape
    stored_size = self.values.shape[1] // self.scales.shape[1]
    size = math.gcd(stored_size, group_size) if group_size else stored_size
    num_groups = num_inputs // size if group_size else 1

    def padded(array, num_rows, sharding):
      result = np.zeros((len(array), num_rows, num_outputs), array.dtype)
      result[:, : array.shape[1], : array.shape[2]] = array
      return sharding_lib.put(result, sharding)

    def groups(array):
      array = np.repeat(array, stored_size // size, axis=1)
      return padded(array, num_groups, shardings[1])

    has_offsets = self.offsets is not None and self.offsets.any()
    return (
      padded(self.values.astype(dtype), num_inputs, shardings[0]),
      groups(self.scales),
      groups(self.offsets) if has_offsets else None,
    )
