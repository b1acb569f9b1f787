"""Lookups and compaction in each row of a batch.

Sums over few places are comparisons of all with all: one small program where a
scan or a scatter would be several to compile.
"""

import jax
import jax.numpy as jnp

# On a CPU XLA makes three kernels of a reduction over more values than that.
_MOST_REDUCED = 32


def count(flags: jax.Array, axis: int = 1) -> jax.Array:
  """Returns i32[B, ...], how many of bool[B, ...] are True along an axis."""
  return flags.sum(axis=axis, dtype=jnp.int32)


def ranks(flags: jax.Array) -> jax.Array:
  """Returns i32[B, n], how many True ones are up to a place, less one."""
  blocks = _split(flags)
  in_block = count(blocks[:, :, None] & _up_to(blocks), axis=3)
  totals = in_block[:, :, -1]
  before = sums_where(_up_to(totals), totals) - totals
  ranks = (in_block + before[:, :, None]).reshape(flags.shape[0], -1) - 1
  return ranks[:, : flags.shape[1]]


def sums_where(flags: jax.Array, values: jax.Array) -> jax.Array:
  """Returns [B, m], sums of the values [B, n] where bool[B, m, n] is True."""
  values = jnp.where(_split(flags), _split(values)[:, None], 0)
  return jnp.sum(values, (2, 3), values.dtype)


def last_of(flags: jax.Array) -> jax.Array:
  """Returns i32[...], the index of the last True of bool[..., n], or -1."""
  places = jnp.arange(1, flags.shape[-1] + 1)
  places = _split(jnp.expand_dims(places, range(flags.ndim - 1)))
  return jnp.max(jnp.where(_split(flags), places, 0), (-2, -1)) - 1


def places_in(indices: jax.Array, size: int) -> jax.Array:
  """Returns i32[B, size], the last place of each number in i32[B, n], or -1."""
  numbers = jnp.arange(size)[None, :, None]
  return last_of(indices[:, None] == numbers)


def _split(values):
  """Returns values [..., n] in two axes, with zeros after the n."""
  size = values.shape[-1]
  width = min(size, _MOST_REDUCED)
  padding = [(0, 0)] * values.ndim
  padding[-1] = 0, -size % width
  values = jnp.pad(values, padding)
  return values.reshape(*values.shape[:-1], -1, width)


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
  is_place = ranks(flags)[:, None] == jnp.arange(size)[None, :, None]
  return jnp.maximum(last_of(is_place & flags[:, None]), 0)


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
