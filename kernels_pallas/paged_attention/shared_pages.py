"""Paged attention where devices share the tokens of each page.

To a device its own rows are pages of fewer rows, and what it sees of them is a
prefix and a mask again. So it runs the code of one device that has all rows.

Legend: X blocks, T tokens of a block, P pages, Z rows of a page, N devices. G
kv heads, Q query heads for each kv head, E head_dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.tree_attention import reference as tree_reference


def paged_attention(
  attend: Callable[..., tuple[jax.Array, jax.Array]],
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  axis_name: str,
  page_size: int,
  window: int | None,
) -> jax.Array:
  """What one device does; no keys or values are exchanged.

  It attends to its rows of all pages: keys and values are [P, Z / N, G * E],
  where the first N devices keep some. What is exchanged are the results and the
  sums of the softmax, along the axis `axis_name` of the mesh. `page_size` is Z.
  `attend` is an implementation that returns the sums, too. The other arguments
  are those of `api.paged_attention`.
  """
  size, num_rows = positions.shape[1], keys.shape[1]
  first = jax.lax.axis_index(axis_name) * num_rows  # of its rows in a page
  keeps_any = first < page_size

  def count(rows):
    """Returns how many of the first `rows` of a text the device has."""
    in_page = jnp.clip(rows % page_size - first, 0, num_rows)
    return jnp.where(keeps_any, rows // page_size * num_rows + in_page, 0)

  prefix = count(prefix_lengths)
  after = prefix[:, None] + jnp.arange(size)[None]  # its rows
  rows = after // num_rows * page_size + first + after % num_rows
  tokens = rows - prefix_lengths[:, None]  # that its rows belong to
  mask = jnp.take_along_axis(
    tree_mask,
    jnp.clip(tokens, 0, size - 1)[:, None],
    axis=2,
    mode='promise_in_bounds',
  )
  mask &= (keeps_any & (tokens < num_tokens[:, None]))[:, None]
  if window is not None:
    # A token sees the rows from here on.
    far = count(jnp.maximum(positions - window + 1, 0))
    positions = far + window - 1
  part, log_sums = attend(
    queries, keys, values, page_table, prefix, num_tokens, mask, positions
  )
  attended = tree_reference.merge_parts(part, log_sums, axis_name, sinks)
  return attended.astype(queries.dtype)
