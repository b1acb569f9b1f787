"""Numbers and scales of MXFP4 in registers (OCP Microscaling Formats).

No kernel knows their dtypes. So it gets integers of the same bits: int4 for
float4_e2m1fn, and uint8 for float8_e8m0fnu.
"""

import jax
import jax.numpy as jnp

SCALES_DTYPE = jnp.uint8
_MANTISSA_BITS = 23  # of float32, whose exponents have the bias of the scales


def as_integers(
  values: jax.Array, scales: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns values and scales as kernels get them: others as they are."""
  if values.dtype != jnp.float4_e2m1fn:
    return values, scales
  return (
    jax.lax.bitcast_convert_type(values, jnp.int4),
    jax.lax.bitcast_convert_type(scales, SCALES_DTYPE),
  )


def numbers(values: jax.Array) -> jax.Array:
  """Returns the numbers f32 of these bits: int4."""
  bits = values.astype(jnp.int32)
  size = bits & 7
  # 0 1 2 3 4 6 8 12 are the doubles, from 0 to 7.
  double = size + jnp.maximum(size - 4, 0) + 2 * jnp.maximum(size - 6, 0)
  number = double.astype(jnp.float32) * 0.5
  return jnp.where(bits < 0, -number, number)


def wide(scales: jax.Array) -> jax.Array:
  """Returns scales in float32: the powers of two of bits in uint8.

  The lowest, 2**-127, becomes 0, which accelerators make of it anyway.
  """
  if scales.dtype != SCALES_DTYPE:
    return scales
  bits = scales.astype(jnp.int32) << _MANTISSA_BITS
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
