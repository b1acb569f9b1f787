"""Rotation, write and paged attention by what suits devices and shape.

Legend: N tokens, X blocks, T tokens of a block. P pages, Z rows of a page, C
pages of a table. G kv heads, Q query heads for each kv head, E head_dim.
"""

import functools

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import calls, dispatch
from kernels_pallas.fused_paged_attention import reference
from kernels_pallas.paged_attention import api as paged_api
from kernels_pallas.tree_attention import api as tree_api


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
  tree_mask: jax.Array | None,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  is_one_row: bool = False,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rotates new tokens, writes them to pages, and attends from them.

  Args:
    heads: [N, G, Q + 2, E] queries, key and value of each kv head, not rotated.
      N is at most X * T.
    cos: f32[N, E / 2] cosines of the angles.
    sin: f32[N, E / 2] sines.
    keys: [P, Z, G * E] pages, as in `paged_attention.api`.
    values: [P, Z, G * E].
    places: i32[N] page * Z + offset of the tokens: rows of their blocks after
      the prefix, in the pages of the table. P * Z or more is written nowhere,
      and seen by the block alone.
    block_tokens: i32[X, T] tokens of the blocks among the N. Those of a block
      lie one after another; padding stands for any.
    block_places: i32[N] places of the tokens among the X * T; any for a token
      that no block has.
    blocks_before: i32[X] how many blocks right in front of a block are of the
      same row, and so are read from `heads`. They have T tokens each; 0 for a
      block without tokens.
    page_table: i32[X, C], as in `paged_attention.api`.
    prefix_lengths: i32[X] rows that every token of a block sees, those of
      `blocks_before` among them.
    num_tokens: i32[X] tokens of the blocks.
    tree_mask: bool[X, T, T] or None, as in `paged_attention.api`.
    positions: i32[X, T], as there.
    sinks: [G, Q] or None.
    scale: factor of the scores.
    window: tokens that are visible.
    is_one_row: whether all blocks are of the same row, as in
      `paged_attention.api`.
    implementation: one of `dispatch.IMPLEMENTATIONS`. Where there is no kernel
      for all of it, the name is that of the code of `paged_attention`.
    sharding: sharding of keys and values, whose last axis alone may be sharded.
      None means JAX's default device.

  Returns:
    [N, G, Q, E], of tokens that no block has something finite; and the keys
    and values.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  options = {'scale': scale, 'window': window}
  arrays = (heads, cos, sin, keys, values, places, block_tokens, block_places)
  arrays += (blocks_before, page_table, prefix_lengths, num_tokens)
  chosen = paged_api.choose(
    'fused_paged_attention',
    reference.queries_of(heads, block_tokens),
    keys,
    page_table.shape[1],
    window,
    sinks,
    calls.for_triton_alone(implementation),
    sharding,
    pages_dtype=heads.dtype,
  )
  if chosen == dispatch.REFERENCE:
    attend = functools.partial(
      paged_api.paged_attention,
      is_one_row=is_one_row,
      implementation=implementation,
      sharding=sharding,
    )
    return reference.fused_paged_attention(
      *arrays, tree_mask, positions, sinks, attend=attend, **options
    )
  arrays += tree_api.for_kernels(tree_mask, positions, sinks)
  *_, groups = calls.axes_of(sharding, 3)
  tokens, pages = P(None, groups), P(None, None, groups)
  return calls.run(
    'fused_paged_attention',
    chosen,
    arrays,
    options,
    sharding,
    (tokens, P(), P(), pages, pages, *[P()] * 9, P(groups)),
    (tokens, pages, pages),
  )
