"""Root-mean-square norm in plain JAX."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
  """Root-mean-square norm over the last axis, computed in float32."""
  wide = x.astype(jnp.float32)
  variance = jax.lax.platform_dependent(
    wide, cpu=_mean_square_of_many, default=_mean_square
  )
  scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
  return (wide * jax.lax.rsqrt(variance + epsilon) * scale).astype(x.dtype)


def _mean_square(x):
  return jnp.mean(x * x, axis=-1, keepdims=True)


def _mean_square_of_many(x):
  """The same with rows of zeros, so that there are at least 8.

  XLA adds up fewer rows in another order on CPUs. With this, steps of any
  number of tokens give the same bits in bfloat16, as its products do anyway.
  """
  rows = x.reshape(-1, x.shape[-1])
  num_rows = len(rows)
  padding = max(8 - num_rows, 0)
  means = _mean_square(jnp.pad(rows, ((0, padding), (0, 0))))
  return means[:num_rows].reshape(*x.shape[:-1], 1)
