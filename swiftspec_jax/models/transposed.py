"""Matrices of float32 on CPUs, kept with the inputs as their last axis.

Legend: N rows, K inputs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from kernels_pallas import products
from swiftspec_jax import sharding as sharding_lib


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
    array = jnp.moveaxis(self.values, -1, 0)
    return array.reshape(*self.in_shape, *array.shape[1:])


def is_faster(dtype: np.dtype, mesh: Mesh) -> bool:
  """Returns whether matrices of this dtype on the mesh should be transposed."""
  return mesh.devices.flat[0].platform == 'cpu' and dtype == np.float32


def place(
  array: np.ndarray,
  num_in_axes: int,
  axes: tuple[str | None, ...],
  mesh: Mesh,
) -> TransposedMatrix:
  """Returns the matrix on a mesh.

  Args:
    array: f32[*inputs, *outputs].
    num_in_axes: number of axes that are inputs; of them only the first may be
      sharded.
    axes: logical names of the axes.
    mesh: devices of the matrix.
  """
  in_shape = array.shape[:num_in_axes]
  merged = array.reshape(math.prod(in_shape), *array.shape[num_in_axes:])
  values = np.ascontiguousarray(np.moveaxis(merged, 0, -1))
  sharding = sharding_lib.sharding_of(mesh, (*axes[num_in_axes:], axes[0]))
  return TransposedMatrix(
    values=sharding_lib.put(values, sharding), in_shape=in_shape
  )


def undone(params: Any) -> Any:
  """Returns a parameter tree with plain arrays, shaped as they are declared."""
  return jax.tree.map(
    lambda x: x.to_array() if isinstance(x, TransposedMatrix) else x,
    params,
    is_leaf=lambda x: isinstance(x, TransposedMatrix),
  )
