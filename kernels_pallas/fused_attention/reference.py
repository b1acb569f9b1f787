"""Rotation, write and attention in plain JAX: what the kernel follows.

Legend: B rows, T new tokens, M cache rows of the tree, S cache capacity, G kv
heads, Q query heads for each kv head, E head_dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.tree_attention import reference

TOLERANCES = reference.TOLERANCES


def fused_attention(
  heads: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  starts: jax.Array,
  *seen: jax.Array | None,
  attend: Callable[..., jax.Array] = reference.tree_attention,
  **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_attention`; `attend` does what `tree_attention` does."""
  queries, new_keys, new_values = rotate_heads(heads, cos, sin)
  keys = write(keys, new_keys, starts)
  values = write(values, new_values, starts)
  return attend(queries, keys, values, *seen, **options), keys, values


def queries_of(heads: jax.Array) -> jax.ShapeDtypeStruct:
  """Returns the abstract queries [..., Q, E] of heads [..., Q + 2, E]."""
  *tokens, num_heads, head_dim = heads.shape
  return jax.ShapeDtypeStruct((*tokens, num_heads - 2, head_dim), heads.dtype)


def rotate_heads(
  heads: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns queries [B, T, G, Q, E], new keys and values [B, T, G, E].

  The arguments are those of `api.fused_attention`.
  """
  num_groups = heads.shape[3] - 2
  queries = heads[:, :, :, :num_groups]
  flat = queries.reshape(*queries.shape[:2], -1, queries.shape[4])
  queries = rotate(flat, cos, sin).reshape(queries.shape)
  new_keys = rotate(heads[:, :, :, num_groups], cos, sin)
  return queries, new_keys, heads[:, :, :, num_groups + 1]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates [B, T, heads, E]; first and second half of E are the pairs.

  Args:
    x: [B, T, heads, E].
    cos: f32[B, T, E / 2] cosines of the angles.
    sin: f32[B, T, E / 2] sines.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  rotated = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def write(rows: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
  """Returns one layer's keys or values with a block of new ones written.

  Args:
    rows: [B, G, S, E].
    new: [B, T, G, E].
    starts: i32[B] first row of each block; the block must fit (the caller
      keeps scratch rows after the last committed one).
  """
  new = jnp.moveaxis(new, 1, 2).astype(rows.dtype)
  if rows.shape[0] > 1:
    write_block = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write_block)(rows, new, starts)
  return jax.lax.dynamic_update_slice_in_dim(rows, new, starts[0], axis=2)
