"""Rotation, write and tree attention in C++, for CPUs.

It is `tree_attention.native` after a function that rotates and writes. That one
is the same over rows and over pages, and for any number of tokens.

Legend: B rows, T new tokens, N tokens of all rows. S cache capacity, P pages, Z
rows of a page. G kv heads, Q query heads for each kv head, E head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.native import library
from kernels_pallas.tree_attention import native

check = native.check


def fused_attention(
  heads: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  starts: jax.Array,
  *seen: jax.Array,
  **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_attention`."""
  (num_rows, num_tokens), capacity = heads.shape[:2], keys.shape[2]
  # As the reference, which updates a slice.
  starts = jnp.clip(starts, 0, capacity - num_tokens)
  first = starts + capacity * jnp.arange(num_rows, dtype=jnp.int32)
  places = first[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
  queries, keys, values = rotate_and_write(
    *(x.reshape(-1, *x.shape[2:]) for x in (heads, cos, sin)),
    keys,
    values,
    places.reshape(-1),
  )
  queries = queries.reshape(num_rows, num_tokens, *queries.shape[1:])
  attended, keys, values = native.tree_attention(
    queries, keys, values, *seen, returns_cache=True, **options
  )
  return attended.astype(heads.dtype), keys, values


def norm_heads(
  heads: jax.Array,
  query_scale: jax.Array,
  key_scale: jax.Array,
  epsilon: float,
) -> jax.Array:
  """Returns heads [..., G, Q + 2, E] with a norm of each query and key.

  Args:
    heads: [..., G, Q + 2, E] as in `api.fused_attention`.
    query_scale: f32[E] factors of queries after the norm.
    key_scale: f32[E] factors of keys.
    epsilon: number that is added to the mean square.
  """
  flat = heads.reshape(-1, *heads.shape[-3:])
  if heads.dtype not in (jnp.float32, jnp.bfloat16):
    flat = flat.astype(jnp.float32)
  normed = library.call(
    'norm_heads',
    jax.ShapeDtypeStruct(flat.shape, flat.dtype),
    flat,
    query_scale.astype(jnp.float32),
    key_scale.astype(jnp.float32),
    in_place={0: 0},
    epsilon=np.float32(epsilon),
  )
  return normed.reshape(heads.shape).astype(heads.dtype)


def rotate_and_write(
  heads: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  places: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rotates tokens, and writes their keys and values.

  Args:
    heads: [N, G, Q + 2, E] as in `api.fused_attention`.
    cos: f32[N, E / 2] cosines of the angles.
    sin: f32[N, E / 2] sines.
    keys: [B, G, S, E], or pages [P, Z, G * E].
    values: like the keys.
    places: i32[N] row * S + place in it, or page * Z + place in it; others than
      those are written nowhere.

  Returns:
    Queries f32[N, G, Q, E] with the bits of the dtype of the heads, and the
    keys and values.
  """
  num_tokens, num_kv_heads, num_heads, head_dim = heads.shape
  queries = (num_tokens, num_kv_heads, num_heads - 2, head_dim)
  return library.call(
    'rotate_and_write',
    (
      jax.ShapeDtypeStruct(queries, jnp.float32),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)),
    ),
    heads,
    cos,
    sin,
    keys,
    values,
    places,
    in_place={3: 1, 4: 2},
  )
