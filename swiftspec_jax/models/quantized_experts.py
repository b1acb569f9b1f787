"""Matrices of experts stored in few bits with scales.

int8 has one scale for each output, float8 one for each output and group of
inputs, and mxfp4 a power of two for each output and 32 inputs (OCP Microscaling
Formats). A product first widens all experts of its matrix. So few bits save
memory here, but no time.

Legend: X experts, K inputs, N outputs, C groups of inputs, R rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas.quantized_matmul import reference
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.models import quantization

_HIGHEST_EXPONENT = 2  # of float4: its highest number is 6


@struct.dataclass(frozen=True, kw_only=True)
class QuantizedExperts:
  """The same matrix of all experts of a layer."""

  values: jax.Array  # int8, float8_e4m3fn or float4_e2m1fn [X, K, N]
  scales: jax.Array  # f32[X, C, N], or float8_e8m0fnu for float4

  def multiply(
    self, rows: jax.Array, sizes: jax.Array, chosen: jax.Array
  ) -> jax.Array:
    """Returns the product of each row with its expert's matrix: f32[R, N].

    Args:
      rows: [R, K], those of one expert side by side.
      sizes: i32[X] rows of each expert.
      chosen: i32[R] expert of each row.
    """
    product = functools.partial(
      jax.lax.ragged_dot,
      rows,
      group_sizes=sizes,
      preferred_element_type=jnp.float32,
    )
    if self.values.dtype == jnp.int8 and self.scales.shape[1] == 1:
      return product(self.values.astype(rows.dtype)) * self.scales[chosen, 0]
    weights = reference.widened(self.values, self.scales)
    return product(weights.astype(rows.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """How a parameter [X, K, N] becomes a QuantizedExperts.

  Attributes:
    weight_dtype: 'int8', 'float8' or 'mxfp4'.
    group_size: number of inputs that share a scale of float8 or mxfp4.
  """

  weight_dtype: str
  group_size: int

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
    return QuantizedExperts(values=values, scales=scales)

  def place(
    self,
    stored: quantization.StoredMatrix,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedExperts:
    """Returns the matrix of a checkpoint; see `quantization.Scheme.place`."""
    is_grouped = stored.scales.shape[1] > 1
    values, scales, _ = stored.put(
      shape[1:],
      self.group_size if is_grouped else None,
      _shardings(axes, mesh, is_grouped),
      quantization.VALUE_DTYPES[self.weight_dtype],
    )
    return QuantizedExperts(values=values, scales=scales)


def _shardings(
  axes: tuple[str | None, ...], mesh: Mesh, is_grouped: bool
) -> tuple[NamedSharding, NamedSharding]:
  """Returns those of values and of scales."""
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
    tiled = {1: scheme.group_size} if scheme.weight_dtype == 'float8' else {}
    dtype = quantization.VALUE_DTYPES[scheme.weight_dtype]
    return quantization.round_weights(array, dtype, (0, 2), tiled)

  return jax.jit(quantize, out_shardings=shardings)


def _to_mxfp4(array: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """Returns float4_e2m1fn and float8_e8m0fnu, as section 6.3 of OCP has it."""
  num_experts, _, num_outputs = array.shape
  groups = array.reshape(num_experts, -1, size, num_outputs)
  highest = jnp.abs(groups).max(axis=2, keepdims=True)
  _, exponents = jnp.frexp(highest)  # of a fraction below 1
  scales = jnp.ldexp(jnp.ones_like(highest), exponents - 1 - _HIGHEST_EXPONENT)
  values = jnp.clip(groups / scales, -6, 6).astype(jnp.float4_e2m1fn)
  return (
    values.reshape(array.shape),
    scales[:, :, 0].astype(jnp.float8_e8m0fnu),
  )
