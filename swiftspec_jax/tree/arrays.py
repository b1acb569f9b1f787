"""Lookups and compaction in each row of a batch.

Sums over few places are comparisons of all with all: one small program where a
scan or a scatter would be several to compile.
"""

import jax
import jax.numpy as jnp


def count(flags: jax.Array, axis: int = 1) -> jax.Array:
  """Returns i32[B, ...], how many of bool[B, ...] are True along an axis."""
  return flags.sum(axis=axis, dtype=jnp.int32)


def ranks(flags: jax.Array) -> jax.Array:
  """Returns i32[B, n], the place of each True among the True ones."""
  return count(flags[:, None] & _up_to(flags), axis=2) - 1


def all_up_to(flags: jax.Array) -> jax.Array:
  """Returns bool[..., n], whether all up to a place are True."""
  return jnp.all(flags[..., None, :] | ~_up_to(flags), axis=-1)


def _up_to(flags):
  """Returns bool[..., n, n], which places are not after a place."""
  places = jnp.arange(flags.shape[-1])
  is_up_to = places[None] <= places[:, None]
  return jnp.expand_dims(is_up_to, range(flags.ndim - 1))


def indices_of(flags: jax.Array, size: int) -> jax.Array:
  """Returns i32[B, size], the indices of the True ones in order, then zeros."""
  steps, rank = jnp.arange(size)[None], ranks(flags)
  # As many as the places before it.
  indices = count(rank[:, None] < steps[:, :, None], axis=2)
  return jnp.where(steps <= rank[:, -1:], indices, 0)


def take(values: jax.Array, indices: jax.Array, axis: int = 1) -> jax.Array:
  """Returns values[b, indices[b, i]]; beyond the ends, the nearest value.

  Both arrays have all axes, as in `jnp.take_along_axis`. Without the promise
  each lookup has 20 operations more, which all have to be compiled.
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
