"""Lookups and compaction in each row of a batch."""

import jax
import jax.numpy as jnp


def count(flags: jax.Array) -> jax.Array:
  """Returns i32[B], how many of bool[B, n] are True."""
  return flags.sum(axis=1, dtype=jnp.int32)


def ranks(flags: jax.Array) -> jax.Array:
  """Returns i32[B, n], the place of each True among the True ones."""
  return jnp.cumsum(flags, axis=1, dtype=jnp.int32) - 1


def indices_of(flags: jax.Array, size: int) -> jax.Array:
  """Returns i32[B, size], the indices of the True ones in order, then zeros."""
  indices = jnp.broadcast_to(jnp.arange(flags.shape[1])[None], flags.shape)
  empty = jnp.zeros((flags.shape[0], size), jnp.int32)
  return put(empty, ranks(flags), indices, flags)


def take(values: jax.Array, indices: jax.Array, axis: int = 1) -> jax.Array:
  """Returns values[b, indices[b, i]]; beyond the ends, the nearest value.

  `indices` has the axes of `values`, as for `jnp.take_along_axis`. Without the
  promise each lookup has 20 operations more, which all have to be compiled.
  """
  indices = jax.lax.clamp(0, indices, values.shape[axis] - 1)
  return jnp.take_along_axis(
    values, indices, axis=axis, mode='promise_in_bounds'
  )


def put(
  values: jax.Array, indices: jax.Array, new: jax.Array, is_used: jax.Array
) -> jax.Array:
  """Sets values[b, indices[b, i]] to new[b, i] where is_used[b, i]."""
  batch = jnp.arange(values.shape[0])[:, None]
  indices = jnp.where(is_used, indices, values.shape[1])
  return values.at[batch, indices].set(
    new, mode='drop', wrap_negative_indices=False
  )
