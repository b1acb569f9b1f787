"""Matrices of float32 on CPUs, kept with the inputs as their last axis.

Legend: N rows, K inputs.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh

from kernels_pallas import products
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.models import array_parts


@struct.dataclass(frozen=True, kw_only=True)
class TransposedMatrix:
  """A matrix as XLA's CPU backend multiplies it fastest with few rows."""

  values: jax.Array  # f32[..., K]
  in_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of K

  def multiply(self, rows: jax.Array) -> jax.Array:
    """Returns rows f32[N, K] times the matrix: f32[N, ...]."""
    return products.multiply_transposed(rows, self.values)

  def to_array(self) -> jax.Array:
    """Returns f32[*in_shape, ...], as the parameter is declared."""
    *outputs, inputs = range(self.values.ndim)
    array = self.values.transpose(inputs, *outputs)
    return array.reshape(*self.in_shape, *array.shape[1:])


def is_faster(dtype: np.dtype, mesh: Mesh) -> bool:
  """Returns whether matrices of this dtype on the mesh should be transposed."""
  return mesh.devices.flat[0].platform == 'cpu' and dtype == np.float32


def place(
  read: Callable[[array_parts.Index], np.ndarray],
  shape: tuple[int, ...],
  num_in_axes: int,
  axes: tuple[str | None, ...],
  mesh: Mesh,
) -> TransposedMatrix:
  """Returns the matrix on a mesh.

  Args:
    read: function that returns a part of the array f32[*inputs, *outputs].
    shape: shape of the array.
    num_in_axes: number of axes that are inputs; of them only the first may be
      sharded.
    axes: logical names of the axes.
    mesh: devices of the matrix.
  """
  in_shape, out_shape = shape[:num_in_axes], shape[num_in_axes:]
  num_inputs, num_behind = math.prod(in_shape), math.prod(in_shape[1:])

  def read_transposed(index):
    *outputs, inputs = index
    start, stop, _ = inputs.indices(num_inputs)
    first = slice(start // num_behind, stop // num_behind)
    part = read((first, *(slice(None),) * (num_in_axes - 1), *outputs))
    merged = part.reshape(stop - start, *part.shape[num_in_axes:])
    return np.ascontiguousarray(np.moveaxis(merged, 0, -1))

  values = jax.make_array_from_callback(
    (*out_shape, num_inputs),
    sharding_lib.sharding_of(mesh, (*axes[num_in_axes:], axes[0])),
    read_transposed,
    dtype=np.float32,
  )
  return TransposedMatrix(values=values, in_shape=in_shape)


def undone(params: Any) -> Any:
  """Returns a parameter tree with plain arrays, shaped as they are declared.

  A tree of NumPy arrays gives NumPy arrays.
  """
  return jax.tree.map(
    lambda x: x.to_array() if isinstance(x, TransposedMatrix) else x,
    params,
    is_leaf=lambda x: isinstance(x, TransposedMatrix),
  )
