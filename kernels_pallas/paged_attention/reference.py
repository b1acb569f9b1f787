"""Paged attention in plain JAX: the definition that the kernels follow.

Legend: X blocks, T tokens of a block, P pages, Z rows of a page, C pages of a
table, G kv heads, Q query heads for each kv head, E head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import padding
from kernels_pallas.tree_attention import reference as tree_reference

TOLERANCES = tree_reference.TOLERANCES


def paged_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  tree_mask: jax.Array | None,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  with_sums: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Tree attention to copies of the pages; see `api.paged_attention`.

  With `with_sums`, which takes no sinks, it also returns the logarithms
  f32[X, T, G, Q] of the sums of the softmax, with zeros for padding.
  """
  num_kv_heads = queries.shape[2]
  keys, values = (
    read_pages(pages, page_table, num_kv_heads, queries.dtype)
    for pages in (keys, values)
  )
  visible = tree_reference.seen_rows(
    prefix_lengths, tree_mask, positions, keys.shape[2], window
  )
  found = tree_reference.attention_part(
    queries, keys, values, visible, scale, sinks
  )
  attended, log_sums = (padding.zero(x, num_tokens) for x in found)
  return (attended, log_sums) if with_sums else attended


def of_one_row(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  **options: Any,
) -> jax.Array:
  """Attention of blocks that are all of one row, with one copy of its pages.

  The blocks are chains, one after the other, so they are one long block.
  Arguments are those of `paged_attention`.
  """
  found = paged_attention(
    queries.reshape(1, -1, *queries.shape[2:]),
    keys,
    values,
    page_table[:1],
    prefix_lengths[:1],
    num_tokens.sum(keepdims=True),
    None,
    positions.reshape(1, -1),
    sinks,
    **options,
  )
  return found.reshape(queries.shape)


def read_pages(
  pages: jax.Array,
  page_table: jax.Array,
  num_kv_heads: int,
  dtype: jax.typing.DTypeLike,
) -> jax.Array:
  """Returns the keys or values [X, G, C * Z, E] of tables i32[X, C].

  Args:
    pages: [P, Z, G * E].
    page_table: pages in order; negative ones stand for none, anything is read.
    num_kv_heads: G.
    dtype: dtype of the result.
  """
  found = pages[jnp.maximum(page_table, 0)].astype(dtype)
  rows = page_table.shape[1] * pages.shape[1]
  found = found.reshape(len(page_table), rows, num_kv_heads, -1)
  return jnp.moveaxis(found, 2, 1)
