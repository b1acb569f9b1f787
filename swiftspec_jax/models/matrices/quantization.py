"""Matrices stored in few bits with scales.

int8 has one scale for each output, int4 and float8 one for each output and
group of inputs, MXFP4 a power of two for each output and 32 inputs (OCP
Microscaling Formats). Only weights are quantized. What we quantize is
symmetric: all sums are those of `values * scales`. Published matrices of int4
have zero points, too, which become an offset for each output and group.
`int8_dynamic` is where activations are quantized, too.

Legend: P parts, K inputs, N outputs, C groups of inputs, T and R rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.grouped_matmul import api as grouped_api
from kernels_pallas.grouped_matmul import tiles as grouped_tiles
from kernels_pallas.quantized_matmul import api, float4, tiles
from kernels_pallas.swiglu import reference as swiglu_reference
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix
from swiftspec_jax.runtime import sharding as sharding_lib

# By `ModelConfig.weight_dtype`.
VALUE_DTYPES = {
  'int8': 'int8',
  'int4': 'int4',
  'float8': 'float8_e4m3fn',
  'mxfp4': 'int4',  # the bits of numbers, see `quantized_matmul.float4`
}
_HIGHEST_EXPONENT = 2  # of float4: its highest number is 6
MIDDLE = 8  # of the 16 integers of int4: what becomes zero
# qwix puts the highest weight right between the last integer and the one
# after it, where the last bit decides and compilers differ. So a bit lower.
_CALIBRATION = 'absmax,1.001'


@struct.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
  """A matrix in the order that kernels read.

  Parts are matrices of the same inputs, each sharded for itself: gate and up.
  Experts are parts of which each row has its own.
  """

  values: jax.Array  # int8, int4 or float8_e4m3fn [P, K, N]
  scales: jax.Array  # f32[P, C, N], or uint8 for MXFP4, see `float4`
  # f32[P, C, N], what is added to `values * scales`; None is nothing.
  offsets: jax.Array | None = None
  out_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of P x N
  sharding: NamedSharding = struct.field(pytree_node=False)  # of values
  kernels: str = struct.field(pytree_node=False)  # as in ModelConfig

  def multiply(self, x: jax.Array) -> jax.Array:
    """Returns rows x [T, K] times the matrix: [T, *out_shape]."""
    product = self._product(x)
    if self.offsets is not None:
      of_offsets = jnp.einsum(
        'tc,pcn->tpn',
        self._group_sums(x),
        self.offsets,
        precision=jax.lax.Precision.HIGHEST,
      )
      product = (product.astype(jnp.float32) + of_offsets).astype(x.dtype)
    return product.reshape(-1, *self.out_shape)

  def multiply_gated(self, x: jax.Array, activation: str) -> jax.Array:
    """Returns act(x gate) * (x up) of rows x [T, K] and two parts: [T, N]."""
    if self.offsets is not None:
      gate, up = jnp.moveaxis(self.multiply(x), 1, 0)
      return swiglu_reference.gated_activation(gate, up, activation)
    return self._product(x, activation)[:, 0]

  def multiply_chosen(self, rows: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns the product of each row with its expert's matrix: [R, N].

    It is in the dtype of the rows, or in float32 where there are offsets.

    Args:
      rows: [R, K].
      chosen: i32[R] expert of each row, in ascending order.
    """
    is_short = len(rows) <= grouped_tiles.MOST_ROWS
    product = grouped_api.grouped_matmul(
      rows,
      self.values,
      self.scales,
      chosen,
      implementation=self.kernels if is_short else dispatch.REFERENCE,
      sharding=self.sharding,
    )
    if self.offsets is None:
      return product
    of_offsets = jax.lax.ragged_dot(
      self._group_sums(rows),
      self.offsets,
      jnp.bincount(chosen, length=len(self.offsets)),
      precision=jax.lax.Precision.HIGHEST,
    )
    return product.astype(jnp.float32) + of_offsets

  def _product(self, x, activation=None):
    # The chunks of a prompt are no work for a kernel of few rows.
    is_short = len(x) <= tiles.MOST_ROWS
    return api.quantized_matmul(
      x,
      self.values,
      self.scales,
      activation=activation,
      implementation=self.kernels if is_short else dispatch.REFERENCE,
      sharding=self.sharding,
    )

  def _group_sums(self, x: jax.Array) -> jax.Array:
    """Returns sums of x [T, K] over inputs with the same offset: [T, C]."""
    groups = x.astype(jnp.float32).reshape(len(x), self.offsets.shape[1], -1)
    return groups.sum(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """How a parameter becomes a QuantizedMatrix.

  Attributes:
    weight_dtype: 'int8', 'int4', 'float8' or, of experts, 'mxfp4'.
    group_size: number of inputs that share a scale where int8 does not.
    kernels: name of the code to run, one of
      `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    num_in_axes: number of axes that are inputs, the first of the parameter.
    num_part_axes: number of axes that are parts, those after the inputs.
    is_experts: whether the parameter is [X, K, N] instead, its parts experts.
  """

  weight_dtype: str
  group_size: int
  kernels: str
  num_in_axes: int = 1
  num_part_axes: int = 0
  is_experts: bool = False

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
        or the first output after the parts.
      mesh: devices of the matrix.
    """
    shardings = self._shardings(axes, mesh, self.weight_dtype != 'int8')
    values, scales = run(_program(self, shardings), shardings, array)
    return self._matrix(array.shape, shardings[0], values, scales)

  def place(
    self,
    stored: StoredMatrix,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedMatrix:
    """Returns the matrix of a checkpoint on a mesh.

    Args:
      stored: matrix of this kind.
      shape: sizes of the axes of the parameter, with padding.
      axes: logical names of these axes.
      mesh: devices of the matrix.
    """
    inputs, parts, outputs = self._split(shape)
    if not self.is_experts:
      stored = stored.by_parts(math.prod(parts))
    is_grouped = stored.is_grouped(self.weight_dtype)
    shardings = self._shardings(axes, mesh, is_grouped)
    arrays = stored.put(
      (math.prod(inputs), math.prod(outputs)),
      self.group_size if is_grouped else None,
      shardings,
      VALUE_DTYPES[self.weight_dtype],
    )
    return self._matrix(shape, shardings[0], *arrays)

  def _split(self, sizes: tuple) -> tuple[tuple, tuple, tuple]:
    """Returns what axes of inputs, parts and outputs have."""
    if self.is_experts:
      return sizes[1:2], sizes[:1], sizes[2:]
    parts, outputs = self.num_in_axes, self.num_in_axes + self.num_part_axes
    return sizes[:parts], sizes[parts:outputs], sizes[outputs:]

  def matrices(self, array: jax.Array) -> jax.Array:
    """Returns a parameter as [P, K, N]."""
    if self.is_experts:
      return array
    inputs, parts, _ = map(math.prod, self._split(array.shape))
    return jnp.moveaxis(array.reshape(inputs, parts, -1), 1, 0)

  def _matrix(self, shape, sharding, values, scales, offsets=None):
    _, parts, outputs = self._split(shape)
    return QuantizedMatrix(
      values=values,
      scales=scales,
      offsets=offsets,
      out_shape=parts + outputs,
      sharding=sharding,
      kernels=self.kernels,
    )

  def _shardings(
    self, axes: tuple[str | None, ...], mesh: Mesh, is_grouped: bool
  ) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of values and of scales."""
    (inputs, *_), _, (outputs, *_) = self._split(axes)
    values, scales = (
      sharding_lib.sharding_of(mesh, (None, axis, outputs))
      for axis in (inputs, inputs if is_grouped else None)
    )
    return values, scales


@functools.cache
def _program(scheme: Scheme, shardings: tuple[NamedSharding, ...]):
  """Returns what makes values and scales of an array."""

  def quantize(array):
    matrices = scheme.matrices(array.astype(jnp.float32))
    if scheme.weight_dtype == 'mxfp4':
      return _to_mxfp4(matrices, scheme.group_size)
    tiled = {1: scheme.group_size} if scheme.weight_dtype != 'int8' else {}
    dtype = VALUE_DTYPES[scheme.weight_dtype]
    return round_weights(matrices, dtype, (0, 2), tiled)

  return jax.jit(quantize, out_shardings=shardings)


def _to_mxfp4(array: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """Returns bits int4 and uint8, as section 6.3 of OCP has them."""
  num_parts, _, num_outputs = array.shape
  groups = array.reshape(num_parts, -1, size, num_outputs)
  highest = jnp.abs(groups).max(axis=2, keepdims=True)
  _, exponents = jnp.frexp(highest)  # of a fraction below 1
  scales = jnp.ldexp(jnp.ones_like(highest), exponents - 1 - _HIGHEST_EXPONENT)
  values = jnp.clip(groups / scales, -6, 6).astype(jnp.float4_e2m1fn)
  return (
    float4.bits(values.astype(jnp.float32)).reshape(array.shape),
    float4.bits_of_scales(scales[:, :, 0]),
  )


def round_weights(
  array: jax.Array,
  dtype: str,
  channelwise_axes: tuple[int, ...],
  tiled_axes: Mapping[int, int],
) -> tuple[jax.Array, jax.Array]:
  """Returns numbers and scales f32 of an array f32, as qwix has them."""
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
  shardings: Sequence[NamedSharding],
  *arrays: jax.Array | jax.ShapeDtypeStruct,
) -> Sequence[jax.Array | jax.ShapeDtypeStruct]:
  """Returns what a program makes of arrays, abstract if these are."""
  if not isinstance(arrays[0], jax.ShapeDtypeStruct):
    return program(*arrays)
  return [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for x, sharding in zip(
      jax.eval_shape(program, *arrays), shardings, strict=True
    )
  ]
