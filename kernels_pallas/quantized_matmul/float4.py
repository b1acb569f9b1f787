"""Numbers and scales of MXFP4 (OCP Microscaling Formats) from their bits.

Arrays hold the bits of float4_e2m1fn as int4, and those of float8_e8m0fnu as
uint8: kernels know no such floats, and XLA for TPUs copies what it reinterprets
(seen in what jax 0.10.2 compiles for v5e).
"""

import jax
import jax.numpy as jnp

# Of float32, whose exponents have the bias of the scales.
_MANTISSA_BITS, _BIAS = 23, 127


def is_used(scales: jax.Array) -> bool:
  """Whether these are the scales of MXFP4."""
  return scales.dtype == jnp.uint8


def numbers(values: jax.Array) -> jax.Array:
  """Returns the numbers f32 of these bits: int4."""
  bits = values.astype(jnp.int32)
  size = bits & 7
  # 0 1 2 3 4 6 8 12 are the doubles, from 0 to 7.
  double = size + jnp.maximum(size - 4, 0) + 2 * jnp.maximum(size - 6, 0)
  number = double.astype(jnp.float32) * 0.5
  return jnp.where(bits < 0, -number, number)


def bits(numbers: jax.Array) -> jax.Array:
  """Returns the bits int4 of numbers f32, which float4_e2m1fn has."""
  size = jnp.abs(numbers)
  # From 1 on those of float32, one of the mantissa, with another bias.
  own = _bits32(size) >> (_MANTISSA_BITS - 1)
  own = jnp.where(size < 1, (2 * size).astype(jnp.int32), own - 2 * _BIAS + 2)
  return jnp.where(jnp.signbit(numbers), own - 8, own).astype(jnp.int4)


def bits_of_scales(scales: jax.Array) -> jax.Array:
  """Returns the bits uint8 of powers of two f32."""
  return (_bits32(scales) >> _MANTISSA_BITS).astype(jnp.uint8)


def _bits32(numbers):
  return jax.lax.bitcast_convert_type(numbers, jnp.int32)


def wide(scales: jax.Array) -> jax.Array:
  """Returns scales in float32: of bits in uint8 the powers of two.

  The lowest, 2**-127, becomes 0, which accelerators make of it anyway.
  """
  if not is_used(scales):
    return scales
  bits = scales.astype(jnp.int32) << _MANTISSA_BITS
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
