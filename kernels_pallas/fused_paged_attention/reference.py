"""Rotation, write and attention in plain JAX: what the kernel follows.

Legend: N tokens, X blocks, T tokens of a block. P pages, Z rows of a page, C
pages of a table. G kv heads, Q query heads for each kv head, E head_dim.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.fused_attention import reference as fused_reference
from kernels_pallas.paged_attention import reference as paged_reference

TOLERANCES = paged_reference.TOLERANCES


def fused_paged_attention(
  heads: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  places: jax.Array,
  block_tokens: jax.Array,
  block_places: jax.Array,
  blocks_before: jax.Array,
  *seen: jax.Array | None,
  attend: Callable[..., jax.Array] = paged_reference.paged_attention,
  **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_paged_attention`; `attend` is as `paged_attention`."""
  del blocks_before
  queries, new_keys, new_values = fused_reference.rotate_heads(
    heads[None], cos[None], sin[None]
  )
  keys = write(keys, new_keys[0], places)
  values = write(values, new_values[0], places)
  attended = attend(queries[0][block_tokens], keys, values, *seen, **options)
  return of_blocks(attended, block_places), keys, values


def queries_of(
  heads: jax.Array, block_tokens: jax.Array
) -> jax.ShapeDtypeStruct:
  """Returns the abstract queries [X, T, G, Q, E]; see the api."""
  in_blocks = (*block_tokens.shape, *heads.shape[1:])
  return fused_reference.queries_of(
    jax.ShapeDtypeStruct(in_blocks, heads.dtype)
  )


def of_blocks(attended: jax.Array, block_places: jax.Array) -> jax.Array:
  """Returns [N, ...] of [X, T, ...]; `block_places` as in the api."""
  return attended.reshape(-1, *attended.shape[2:])[block_places]


def write(
  pages: jax.Array,
  new: jax.Array,
  places: jax.Array,
  page_size: int | None = None,
) -> jax.Array:
  """Returns one layer's keys or values, or features, with new ones written.

  Args:
    pages: [P, Y, G * E], or features [P, Z, H].
    new: [N, G, E], or [N, H].
    places: i32[N] page * Z + offset; P * Z or more is written nowhere.
    page_size: Z; None if Y is Z.
  """
  new = new.reshape(len(new), -1)
  if len(places) == 1:
    # XLA CPU copies the whole cache to write a single row; the second one is
    # written nowhere.
    new = jnp.concatenate([new, new])
    places = jnp.append(places, pages.shape[0] * pages.shape[1])
  # Pages are not merged: devices may share the tokens of each.
  index = jnp.divmod(places, page_size or pages.shape[1])
  return pages.at[index].set(new.astype(pages.dtype), mode='drop')
