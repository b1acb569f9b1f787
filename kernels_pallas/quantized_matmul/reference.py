"""Product with a quantized weight in plain JAX.

Legend: T rows, P parts, K inputs, N outputs, C groups of inputs.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_matmul import float4
from kernels_pallas.swiglu import reference as gate

TOLERANCES = gate.TOLERANCES


def quantized_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *,
  activation: str | None = None,
) -> jax.Array:
  """See `api.quantized_matmul`."""
  # One product for each part: together they would need a transposed copy.
  parts = [_product(x, *part) for part in zip(values, scales, strict=True)]
  if activation:
    return gate.gated_activation(*parts, activation)[:, None]
  return jnp.stack(parts, axis=1)


def _product(x, values, scales):
  """x [T, K] times values [K, N] with scales f32[C, N]."""
  if scales.shape[0] == 1 and jnp.issubdtype(values.dtype, jnp.integer):
    product = jnp.dot(
      x, values.astype(x.dtype), preferred_element_type=jnp.float32
    )
    return (product * scales).astype(x.dtype)
  return jnp.dot(x, widened(values, scales).astype(x.dtype))


def widened(values: jax.Array, scales: jax.Array) -> jax.Array:
  """Returns the weights f32[..., K, N].

  Args:
    values: integers or floats [..., K, N].
    scales: f32[..., C, N], one for each output and group of inputs, or uint8
      for MXFP4, see `float4`.
  """
  if float4.is_used(scales):
    values, scales = float4.numbers(values), float4.wide(scales)
  *leading, num_groups, num_outputs = scales.shape
  grouped = values.astype(jnp.float32).reshape(
    *leading, num_groups, -1, num_outputs
  )
  return (grouped * scales[..., None, :]).reshape(values.shape)
