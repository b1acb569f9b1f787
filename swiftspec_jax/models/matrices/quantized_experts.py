"""Matrices of experts stored in few bits with scales.

int8 has one scale for each output, int4 and float8 one for each output and
group of inputs. mxfp4 has a power of two for each output and 32 inputs (OCP
Microscaling Formats). int4 may have offsets besides, as in `quantization`.

Legend: X experts, K inputs, N outputs, C groups of inputs, R rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.grouped_matmul import api, tiles
from kernels_pallas.quantized_matmul import float4
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.models.matrices import quantization

_HIGHEST_EXPONENT = 2  # of float4: its highest number is 6


@struct.dataclass(frozen=True, kw_only=True)
class QuantizedExperts:
  """The same matrix of all experts of a layer."""

  values: jax.Array  # int8, int4 or float8_e4m3fn [X, K, N]
  scales: jax.Array  # f32[X, C, N], or uint8 for MXFP4, see `float4`
  # f32[X, C, N], what is added to `values * scales`; None is nothing.
  offsets: jax.Array | None = None
  sharding: NamedSharding = struct.field(pytree_node=False)  # of values
  kernels: str = struct.field(pytree_node=False)  # as in ModelConfig

  def multiply(self, rows: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns the product of each row with its expert's matrix: [R, N].

    It is in the dtype of the rows, or in float32 where there are offsets.

    Args:
      rows: [R, K].
      chosen: i32[R] expert of each row, in ascending order.
    """
    # The chunks of a prompt are no work for a kernel of few rows.
    is_short = len(rows) <= tiles.MOST_ROWS
    product = api.grouped_matmul(
      rows,
      self.values,
      self.scales,
      chosen,
      implementation=self.kernels if is_short else dispatch.REFERENCE,
      sharding=self.sharding,
    )
    if self.offsets is None:
      return product
    return product.astype(jnp.float32) + self._offset_product(rows, chosen)

  def _offset_product(self, rows: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns rows [R, K] times the offsets of their experts: f32[R, N].

    As the inputs of a group have the same, that is a small product of the sums
    of rows over groups.
    """
    num_experts, num_groups, _ = self.offsets.shape
    groups = rows.astype(jnp.float32).reshape(len(rows), num_groups, -1)
    return jax.lax.ragged_dot(
      groups.sum(axis=-1),
      self.offsets,
      jnp.bincount(chosen, length=num_experts),
      precision=jax.lax.Precision.HIGHEST,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """How a parameter [X, K, N] becomes a QuantizedExperts.

  Attributes:
    weight_dtype: 'int8', 'int4', 'float8' or 'mxfp4'.
    group_size: number of inputs that share a scale where int8 does not.
    kernels: name of the code to run, one of
      `kernels_pallas.dispatch.IMPLEMENTATIONS`.
  """

  weight_dtype: str
  group_size: int
  kernels: str

  def quantize(
    self,
    array: jax.Array | jax.ShapeDtypeStruct,
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedExperts:
    """Returns the matrix; see `quantization.Scheme.quantize`."""
    shardings = _shardings(axes, mesh, self.weight_dtype != 'int8')
    program = _program(self, shardings)
    values, scales = quantization.run(program, array, shardings)
    return QuantizedExperts(
      values=values, scales=scales, sharding=shardings[0], kernels=self.kernels
    )

  def place(
    self,
    stored: quantization.StoredMatrix,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedExperts:
    """Returns the matrix of a checkpoint; see `quantization.Scheme.place`."""
    is_grouped = stored.is_grouped(self.weight_dtype)
    shardings = _shardings(axes, mesh, is_grouped)
    values, scales, offsets = stored.put(
      shape[1:],
      self.group_size if is_grouped else None,
      shardings,
      quantization.VALUE_DTYPES[self.weight_dtype],
    )
    return QuantizedExperts(
      values=values,
      scales=scales,
      offsets=offsets,
      sharding=shardings[0],
      kernels=self.kernels,
    )


def _shardings(
  axes: tuple[str | None, ...], mesh: Mesh, is_grouped: bool
) -> tuple[NamedSharding, NamedSharding]:
  """Returns the shardings of values and of scales."""
  experts, inputs, outputs = axes
  of_scales = experts, inputs if is_grouped else None, outputs
  return (
    sharding_lib.sharding_of(mesh, axes),
    sharding_lib.sharding_of(mesh, of_scales),
  )


@functools.cache
def _program(scheme: Scheme, shardings: tuple[NamedSharding, ...]):
  """Returns what makes values and scales of an array."""

  def quantize(array):
    array = array.astype(jnp.float32)
    if scheme.weight_dtype == 'mxfp4':
      return _to_mxfp4(array, scheme.group_size)
    tiled = {1: scheme.group_size} if scheme.weight_dtype != 'int8' else {}
    dtype = quantization.VALUE_DTYPES[scheme.weight_dtype]
    return quantization.round_weights(array, dtype, (0, 2), tiled)

  return jax.jit(quantize, out_shardings=shardings)


def _to_mxfp4(array: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """Returns bits int4 and uint8, as section 6.3 of OCP has them."""
  num_experts, _, num_outputs = array.shape
  groups = array.reshape(num_experts, -1, size, num_outputs)
  highest = jnp.abs(groups).max(axis=2, keepdims=True)
  _, exponents = jnp.frexp(highest)  # of a fraction below 1
  scales = jnp.ldexp(jnp.ones_like(highest), exponents - 1 - _HIGHEST_EXPONENT)
  values = jnp.clip(groups / scales, -6, 6).astype(jnp.float4_e2m1fn)
  return (
    float4.bits(values.astype(jnp.float32)).reshape(array.shape),
    float4.bits_of_scales(scales[:, :, 0]),
  )
