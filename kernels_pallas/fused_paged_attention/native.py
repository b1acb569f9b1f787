"""Rotation, write and paged attention in C++, for CPUs.

Legend: N tokens, X blocks, T tokens of a block. P pages, Z rows of a page, C
pages of a table. G kv heads, Q query heads for each kv head, E head_dim.
"""

from typing import Any

import jax

from kernels_pallas.fused_attention import native as fused_native
from kernels_pallas.fused_paged_attention import reference
from kernels_pallas.paged_attention import native as paged_native


def check(
  heads_shape: tuple[int, ...],
  blocks: tuple[int, int],
  pages_shape: tuple[int, ...],
  num_columns: int,
  dtype: jax.typing.DTypeLike,
) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it.

  Args:
    heads_shape: N, G, Q + 2, E.
    blocks: X, T.
    pages_shape: P, Z, G * E.
    num_columns: C.
    dtype: dtype of the heads. Pages have it, or float32.
  """
  queries_shape = (*blocks, *heads_shape[1:])
  paged_native.check(queries_shape, pages_shape, num_columns, dtype)


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
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_paged_attention`."""
  del blocks_before
  queries, keys, values = fused_native.rotate_and_write(
    heads, cos, sin, keys, values, places
  )
  attended = paged_native.paged_attention(
    queries[block_tokens],
    keys,
    values,
    page_table,
    prefix_lengths,
    num_tokens,
    tree_mask,
    positions,
    sinks,
    **options,
  )
  attended = reference.of_blocks(attended, block_places)
  return attended.astype(heads.dtype), keys, values
