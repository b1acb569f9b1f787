"""What all implementations share: arithmetic in which the order is no matter.

Counts are integers, and so are the weights that stand for probabilities here:
whatever adds them up, in tiles of any size, comes to the same sum. Only
operations are used that every device rounds alike (no exponential, no
multiplication followed by an addition), so that a threshold does not depend on
the implementation.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kernels_pallas import products, tiles

MOST_TOKENS = 2**19  # of a vocabulary; sums of more could overflow
LEAST = -(2**31)
_LIMB_BITS = 15
_LIMB = 2**_LIMB_BITS - 1
_FRACTION_BITS = 16
# 2**-x for x from 0 to 1, times 2**30; signs alternate. Exact at 0, elsewhere
# within 3e-6 of the value (fitted).
_SERIES = (7335690, 57148380, 257114720, 744171342, 2**30)


def check(logits: jax.Array) -> None:
  """Raises NotImplementedError for logits [B, T, V] that no kernel can do."""
  products.check_dtype(logits.dtype, ['float32'])
  tiles.check_most(logits.shape[2], MOST_TOKENS, 'tokens')


def keys_of(logits: jax.Array) -> jax.Array:
  """Returns integers i32 in the order of the logits f32, of any shape."""
  return _reorder(jax.lax.bitcast_convert_type(logits, jnp.int32))


def logits_of(keys: jax.Array) -> jax.Array:
  """Returns the logits of keys; -inf for those that none has."""
  logits = jax.lax.bitcast_convert_type(_reorder(keys), jnp.float32)
  # -inf has the least key of all numbers.
  return jnp.where(keys < _reorder(jnp.int32(-(2**23))), -jnp.inf, logits)


def _reorder(bits):
  """Orders the bits of negative floats the other way round."""
  return bits ^ ((bits >> 31) & jnp.int32(2**31 - 1))


def weights_of(logits: jax.Array, highest: jax.Array) -> jax.Array:
  """Returns exp(logits - highest) in units of 2**-30, rounded, as integers.

  They are within 2e-5 of the exact value, and zero below 2**-30.

  Args:
    logits: f32.
    highest: f32 of the row, of the same shape or broadcast to it.

  Returns:
    i32 from 0 to 2**30.
  """
  below = jnp.where(logits < highest, highest - logits, jnp.float32(0))
  # Of exponents of two: powers beyond the last one are zero, too.
  units = below * jnp.float32(2**_FRACTION_BITS * 1.4426950408889634)
  units = jnp.minimum(units, jnp.float32(31 * 2**_FRACTION_BITS))
  units = units.astype(jnp.int32)
  fraction = units & jnp.int32(2**_FRACTION_BITS - 1)
  power = jnp.full_like(units, _SERIES[0])
  for term in _SERIES[1:]:
    # The product has 46 bits; no half of it overflows.
    high = ((power >> _LIMB_BITS) * fraction) >> 1
    low = ((power & jnp.int32(_LIMB)) * fraction) >> _FRACTION_BITS
    power = jnp.int32(term) - (high + low)
  return power >> (units >> _FRACTION_BITS)


def limbs_of(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the high and low halves, up to 2**15, of weights."""
  return weights >> _LIMB_BITS, weights & jnp.int32(_LIMB)


def add_up(
  high: jax.Array, low: jax.Array, axes: Sequence[int], *, keepdims: bool
) -> jax.Array:
  """Returns f32 sums of weights, whose exact values are rounded once.

  Args:
    high: i32 sums of high halves, of up to 2**15 tokens each.
    low: i32 sums of low halves, of the same tokens.
    axes: axes to add up, one after the other, of up to 2**15 sums each.
    keepdims: whether the axes stay, with size 1.
  """
  high += low >> _LIMB_BITS
  parts = [
    high >> _LIMB_BITS,
    high & jnp.int32(_LIMB),
    low & jnp.int32(_LIMB),
  ]
  for axis in axes:
    parts = [part.sum(axis=axis, keepdims=keepdims) for part in parts]
  top, middle, bottom = parts
  middle += bottom >> _LIMB_BITS
  top += middle >> _LIMB_BITS
  # Where the first addition rounds, the second one changes nothing.
  upper = _scaled(top) + (middle & jnp.int32(_LIMB)).astype(jnp.float32)
  return _scaled(upper) + (bottom & jnp.int32(_LIMB)).astype(jnp.float32)


def _scaled(values):
  """Times a power of two: exact."""
  return values.astype(jnp.float32) * jnp.float32(2**_LIMB_BITS)


def search(
  measure: Callable[[jax.Array], jax.Array], goals: jax.Array
) -> jax.Array:
  """Returns the highest keys i32 whose measure is the goal at least.

  `LEAST` is returned where there is none.

  Args:
    measure: f32 of the tokens with at least the keys i32, which have the
      shape of `goals`.
    goals: f32.
  """

  def body(i, keys):
    # Wraps around in the first step.
    candidates = keys + jax.lax.shift_left(jnp.int32(1), jnp.int32(31) - i)
    return jnp.where(measure(candidates) >= goals, candidates, keys)

  start = jnp.full(goals.shape, LEAST, jnp.int32)
  return jax.lax.fori_loop(jnp.int32(0), jnp.int32(32), body, start)
