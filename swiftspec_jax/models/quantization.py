"""Matrices stored as integers with scales.

int8 has one scale for each output, int4 one for each output and group of
inputs. Only weights are quantized. What we quantize is symmetric: all sums are
those of `values * scales`. Published matrices of int4 have zero points, too,
which become an offset for each output and group. `int8_dynamic` is where
activations are quantized, too.

Legend: P parts, K inputs, N outputs, C groups of inputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.quantized_matmul import api, tiles
from swiftspec_jax import sharding as sharding_lib

MIDDLE = 8  # of the 16 integers of int4: what becomes zero
# qwix puts the highest weight right between the last integer and the one
# behind it, where the last bit decides and compilers differ. So a bit lower.
_CALIBRATION = 'absmax,1.001'


@struct.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
  """A matrix in the order that kernels read.

  Parts are matrices of the same inputs, each sharded for itself: gate and up.
  """

  values: jax.Array  # int8 or int4 [P, K, N]
  scales: jax.Array  # f32[P, C, N]
  # f32[P, C, N], what is added to `values * scales`; None is nothing.
  offsets: jax.Array | None = None
  out_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of P x N
  sharding: NamedSharding = struct.field(pytree_node=False)  # of values
  kernels: str = struct.field(pytree_node=False)  # as in ModelConfig

  def multiply(self, x: jax.Array) -> jax.Array:
    """Returns rows x [T, K] times the matrix: [T, *out_shape]."""
    # The chunks of a prompt are no work for a kernel of few rows.
    is_short = len(x) <= tiles.MOST_ROWS
    product = api.quantized_matmul(
      x,
      self.values,
      self.scales,
      implementation=self.kernels if is_short else dispatch.REFERENCE,
      sharding=self.sharding,
    )
    if self.offsets is not None:
      total = product.astype(jnp.float32) + self._offset_product(x)
      product = total.astype(x.dtype)
    return product.reshape(-1, *self.out_shape)

  def _offset_product(self, x: jax.Array) -> jax.Array:
    """Returns rows x [T, K] times the offsets of their inputs: f32[T, P, N].

    As the inputs of a group have the same, that is a small product of the sums
    of rows over groups.
    """
    groups = x.astype(jnp.float32).reshape(len(x), self.offsets.shape[1], -1)
    return jnp.einsum(
      'tc,pcn->tpn',
      groups.sum(axis=-1),
      self.offsets,
      precision=jax.lax.Precision.HIGHEST,
    )


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
  """A matrix of int4 as a checkpoint has it, on the host and without padding.

  Attributes:
    values: int8[P, K, N] from -8 to 7.
    scales: f32[P, C, N].
    offsets: f32[P, C, N].
  """

  values: np.ndarray
  scales: np.ndarray
  offsets: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """How a parameter becomes a QuantizedMatrix.

  Attributes:
    weight_dtype: 'int8' or 'int4'.
    num_in_axes: number of axes that are inputs, the first of the parameter.
    num_part_axes: number of axes that are parts, those behind the inputs.
    group_size: number of inputs that share the scales of int4.
    kernels: name of the code to run, one of
      `kernels_pallas.dispatch.IMPLEMENTATIONS`.
  """

  weight_dtype: str
  num_in_axes: int
  num_part_axes: int
  group_size: int
  kernels: str

  def quantize(
    self,
    array: jax.Array | jax.ShapeDtypeStruct,
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedMatrix:
    """Returns the matrix, whose numbers do not depend on the mesh.

    Args:
      array: parameter on the mesh; if it is abstract, so is the matrix.
      axes: logical names of its axes. At most one is sharded: the first input,
        or the first output behind the parts.
      mesh: devices of the matrix.
    """
    shardings = self._shardings(axes, mesh)
    values, scales = run(_program(self, shardings), array, shardings)
    return QuantizedMatrix(
      values=values,
      scales=scales,
      out_shape=array.shape[self.num_in_axes :],
      sharding=shardings[0],
      kernels=self.kernels,
    )

  def place(
    self,
    stored: StoredMatrix,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedMatrix:
    """Returns the integers of a checkpoint on a mesh.

    Args:
      stored: matrix of int4.
      shape: sizes of the axes of the parameter, with padding.
      axes: logical names of these axes.
      mesh: devices of the matrix.
    """
    num_inputs = math.prod(shape[: self.num_in_axes])
    out_shape = shape[self.num_in_axes :]
    num_outputs = math.prod(out_shape[self.num_part_axes :])
    stored_size = stored.values.shape[1] // stored.scales.shape[1]
    # No group may be that of two devices.
    size = math.gcd(stored_size, self.group_size)
    values_sharding, sharding = self._shardings(axes, mesh)

    def put(array, num_rows, sharding):
      missing = num_rows - array.shape[1], num_outputs - array.shape[2]
      array = np.pad(array, ((0, 0), *((0, size) for size in missing)))
      return sharding_lib.put(array, sharding)

    def put_groups(array):
      array = np.repeat(array, stored_size // size, axis=1)
      return put(array, num_inputs // size, sharding)

    return QuantizedMatrix(
      values=put(stored.values.astype(jnp.int4), num_inputs, values_sharding),
      scales=put_groups(stored.scales),
      offsets=put_groups(stored.offsets) if stored.offsets.any() else None,
      out_shape=out_shape,
      sharding=values_sharding,
      kernels=self.kernels,
    )

  def _shardings(
    self, axes: tuple[str | None, ...], mesh: Mesh
  ) -> tuple[NamedSharding, NamedSharding]:
    """Returns those of values and of scales."""
    is_grouped = self.weight_dtype == 'int4'
    outputs = axes[self.num_in_axes + self.num_part_axes]
    values, scales = (
      sharding_lib.sharding_of(mesh, (None, inputs, outputs))
      for inputs in (axes[0], axes[0] if is_grouped else None)
    )
    return values, scales


@functools.cache
def _program(scheme: Scheme, shardings: tuple[NamedSharding, ...]):
  """Returns what makes values and scales of an array."""

  def quantize(array):
    parts_axis = scheme.num_in_axes
    outputs_axis = parts_axis + scheme.num_part_axes
    matrices = array.astype(jnp.float32).reshape(
      math.prod(array.shape[:parts_axis]),
      math.prod(array.shape[parts_axis:outputs_axis]),
      -1,
    )
    tiled = {1: scheme.group_size} if scheme.weight_dtype == 'int4' else {}
    return round_weights(
      jnp.moveaxis(matrices, 1, 0), scheme.weight_dtype, (0, 2), tiled
    )

  return jax.jit(quantize, out_shardings=shardings)


def round_weights(
  array: jax.Array,
  dtype: str,
  channelwise_axes: tuple[int, ...],
  tiled_axes: Mapping[int, int],
) -> tuple[jax.Array, jax.Array]:
  """Returns integers and scales f32 of an array f32, as qwix has them."""
  # Here, as it takes long to import and few programs need it.
  import qwix

  quantized = qwix.quantize(
    array,
    dtype,
    channelwise_axes=channelwise_axes,
    tiled_axes=tiled_axes,
    calibration_method=_CALIBRATION,
  )
  return quantized.qvalue, quantized.scale


def run(
  program: Callable[..., Sequence[jax.Array]],
  array: jax.Array | jax.ShapeDtypeStruct,
  shardings: Sequence[NamedSharding],
) -> Sequence[jax.Array | jax.ShapeDtypeStruct]:
  """Returns what a program makes of an array, abstract if the array is."""
  if not isinstance(array, jax.ShapeDtypeStruct):
    return program(array)
  return [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for x, sharding in zip(
      jax.eval_shape(program, array), shardings, strict=True
    )
  ]
