"""Matrices on CPUs, kept with the inputs as their last axis.

Legend: N rows, K inputs.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from kernels_pallas.few_rows import api
from swiftspec_jax.models import array_parts
from swiftspec_jax.models.matrices.row_products import RowProducts
from swiftspec_jax.models.param_specs import ParamSpec
from swiftspec_jax.runtime import sharding as sharding_lib


@struct.dataclass(frozen=True, kw_only=True)
class TransposedMatrix(RowProducts):
  """A matrix as XLA's CPU backend multiplies it fastest with few rows."""

  values: jax.Array  # float32 or bfloat16 [..., K]
  in_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of K
  kernels: str = struct.field(pytree_node=False)  # of `few_rows`

  def _multiply(self, x, *norm, **options):
    return api.few_rows(
      x, self.values, None, *norm, implementation=self.kernels, **options
    )

  def to_array(self) -> jax.Array:
    """Returns [*in_shape, ...], as the parameter is declared."""
    *outputs, inputs = range(self.values.ndim)
    array = self.values.transpose(inputs, *outputs)
    return array.reshape(*self.in_shape, *array.shape[1:])


def is_faster(dtype: np.dtype, mesh: Mesh) -> bool:
  """Returns whether matrices of this dtype on the mesh should be transposed."""
  is_on_cpu = mesh.devices.flat[0].platform == 'cpu'
  return is_on_cpu and dtype in (jnp.float32, jnp.bfloat16)


def place(
  read: Callable[[array_parts.Index], np.ndarray],
  spec: ParamSpec,
  mesh: Mesh,
  dtype: np.dtype,
) -> TransposedMatrix:
  """Returns a matrix [*inputs, *outputs] on a mesh, padded.

  Args:
    read: function that returns a part of the padded array.
    spec: description of the matrix. Of its inputs only the first may be
      sharded.
    mesh: devices of the matrix.
    dtype: dtype of the array, one of `is_faster`.
  """
  shape, num_in_axes, axes = spec.padded_shape, spec.num_in_axes, spec.axes
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
    dtype=dtype,
  )
  return TransposedMatrix(
    values=values, in_shape=in_shape, kernels=api.usable_on(mesh, spec.kernels)
  )


def undone(params: Any) -> Any:
  """Returns a parameter tree with plain arrays, shaped as they are declared.

  A tree of NumPy arrays gives NumPy arrays.
  """
  return jax.tree.map(
    lambda x: x.to_array() if isinstance(x, TransposedMatrix) else x,
    params,
    is_leaf=lambda x: isinstance(x, TransposedMatrix),
  )
