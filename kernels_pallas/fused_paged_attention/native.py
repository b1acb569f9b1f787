"""Rotation, write and paged attention in C++, for CPUs.

Legend: N tokens, X blocks, T tokens of a block. P pages, Z rows of a page, C
pages of a table. G kv heads, Q query heads for each kv head, E head_dim.
"""

from typing import Any

import jax

from kernels_pallas.fused_attention import native as fused_native
from kernels_pallas.fused_paged_attention import reference
from kernels_pallas.paged_attention import native as paged_native

check = paged_native.check


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
  *seen: jax.Array,
  **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """See `api.fused_paged_attention`."""
  del blocks_before
  queries, keys, values = fused_native.rotate_and_write(
    heads, cos, sin, keys, values, places
  )
  queries = queries[block_tokens]
  attended = paged_native.paged_attention(
    queries, keys, values, *seen, **options
  )
  attended = reference.of_blocks(attended, block_places)
  return attended.astype(heads.dtype), keys, values
