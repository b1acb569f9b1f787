"""Paged attention in C++, for CPUs.

It is `tree_attention.native`, which looks up where rows are. So a token gets
the same bits whatever pages the rows lie in, and from rows of a cache.

Legend: X blocks, T tokens of a block, P pages, Z rows of a page, C pages of a
table, G kv heads, Q query heads for each kv head, E head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.tree_attention import native as tree_native


def check(queries: jax.Array, pages: jax.Array, num_columns: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  del num_columns
  num_pages, page_size, _ = pages.shape
  if num_pages * page_size > jnp.iinfo(jnp.uint32).max:
    raise NotImplementedError(
      f'{num_pages} pages of {page_size} rows are more than 2^32 rows'
    )
  tree_native.check(queries, pages, queries.shape[1])


def paged_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  *seen: jax.Array,
  with_sums: bool = False,
  **options: Any,
) -> jax.Array:
  """See `reference.paged_attention`; there are no sums to return."""
  if with_sums:
    raise NotImplementedError('no sums of the softmax are returned')
  return tree_native.tree_attention(
    queries,
    keys,
    values,
    prefix_lengths,
    *seen,
    page_table=page_table,
    num_tokens=num_tokens,
    **options,
  )
