"""Paged attention where devices share the tokens of each page.

Legend: X blocks, T tokens of a block, P pages, Z rows of a page, C pages of a
table, N devices. G kv heads, E head_dim.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import padding, reference
from kernels_pallas.tree_attention import reference as tree_reference


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
  axis_name: str,
  page_size: int,
  scale: float,
  window: int | None = None,
  soft_cap: float | None = None,
) -> jax.Array:
  """What one device does; no keys or values are exchanged.

  It attends to its rows of all pages: keys and values are [P, Z / N, G * E],
  where the first N devices keep some. What is exchanged are the results and the
  sums of the softmax, along the axis `axis_name` of the mesh. `page_size` is Z.
  The other arguments are those of `api.paged_attention`.
  """
  num_blocks, num_columns = page_table.shape
  num_keeping = page_size // keys.shape[1]
  visible = tree_reference.seen_rows(
    prefix_lengths,
    tree_mask,
    positions,
    num_columns * page_size,
    window,
  ).reshape(*positions.shape, num_columns, num_keeping, keys.shape[1])
  me = jax.lax.axis_index(axis_name)
  visible = jax.lax.dynamic_index_in_dim(visible, me, 3, keepdims=False)
  visible &= me < num_keeping
  if sinks is not None:  # the first device counts them
    sinks = jnp.where(me == 0, sinks, tree_reference.MASKED_SCORE)
  keys, values = (
    reference.read_pages(pages, page_table, queries.shape[2], queries.dtype)
    for pages in (keys, values)
  )
  part, log_sums = tree_reference.attention_part(
    queries,
    keys,
    values,
    visible.reshape(num_blocks, positions.shape[1], -1),
    scale,
    soft_cap,
    sinks,
  )
  attended = tree_reference.merge_parts(part, log_sums, axis_name)
  return padding.zero(attended.astype(queries.dtype), num_tokens)


def refuse() -> None:
  """Raises NotImplementedError, as no kernel gives the sums of its softmax."""
  raise NotImplementedError('it does not merge with the parts of other devices')
