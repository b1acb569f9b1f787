"""Rotation, write and paged attention by what suits devices and shape.

Legend: N tokens, X blocks, T tokens of a block. P pages, Z rows of a page, C
pages of a table. G kv heads, Q query heads for each kv head, E head_dim.
"""

import functools

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import dispatch, registry, trials, tuning
from kernels_pallas.fused_paged_attention import arg_specs, reference
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
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`. Where there is no kernel for all of it, the
      name is that of the code of `paged_attention`.
    sharding: sharding of keys and values, whose last axis alone may be sharded.
      None means JAX's default device.

  Returns:
    [N, G, Q, E], of tokens that no block has something finite; and the keys
    and values.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  options = {'scale': scale, 'window': window}
  blocks, num_columns = block_tokens.shape, page_table.shape[1]
  chosen = _choose(
    heads, keys, blocks, num_columns, window, sinks, implementation, sharding
  )
  if chosen == dispatch.REFERENCE:
    queries, keys, values = reference.rotate_and_write(
      heads, cos, sin, keys, values, places
    )
    attended = paged_api.paged_attention(
      queries[block_tokens],
      keys,
      values,
      page_table,
      prefix_lengths,
      num_tokens,
      tree_mask,
      positions,
      **options,
      sinks=sinks,
      is_one_row=is_one_row,
      implementation=implementation,
      sharding=sharding,
    )
    return reference.of_blocks(attended, block_places), keys, values
  if tree_mask is None:
    tree_mask = tree_api.chain_mask(positions)
  call = registry.function('fused_paged_attention', chosen)
  call = functools.partial(call, **options)
  call = tuning.tuned('fused_paged_attention', chosen, call, sharding)
  arrays = (heads, cos, sin, keys, values, places, block_tokens, block_places)
  arrays = (*arrays, blocks_before, page_table, prefix_lengths, num_tokens)
  arrays = (*arrays, tree_mask, positions)
  if sinks is not None:
    arrays = (*arrays, sinks)
  if sharding is not None:
    groups = (*sharding.spec, None, None, None)[2]
    tokens, pages = P(None, groups), P(None, None, groups)
    specs = (tokens, P(), P(), pages, pages, *[P()] * 9, P(groups))
    call = jax.shard_map(
      call,
      mesh=sharding.mesh,
      in_specs=specs[: len(arrays)],
      out_specs=(tokens, pages, pages),
      check_vma=False,
    )
  return call(*arrays)


def _choose(
  heads, keys, blocks, num_columns, window, sinks, implementation, sharding
):
  """Returns the name of the implementation."""
  if implementation in ('pallas_tpu', 'mosaic_gpu'):
    implementation = dispatch.REFERENCE
  num_all, num_kv_heads, num_heads, head_dim = heads.shape
  pages = keys.shape
  if sharding is not None:
    pages = sharding.shard_shape(pages)
    num_kv_heads = num_kv_heads * pages[2] // keys.shape[2]
  local = (num_all, num_kv_heads, num_heads, head_dim)
  spec = arg_specs.ArgSpec.of_pages(
    f'heads {heads.dtype}{list(local)}, blocks {list(blocks)}',
    (*blocks, num_kv_heads, num_heads - 2, head_dim),
    pages,
    num_columns,
    heads.dtype,
    has_sinks=sinks is not None,
    window=window,
  )
  return dispatch.choose(
    'fused_paged_attention',
    spec.name,
    implementation,
    dispatch.platform_of(sharding),
    registry.checks(
      'fused_paged_attention', local, blocks, pages, num_columns, heads.dtype
    ),
    trial=functools.partial(
      trials.verdict, 'fused_paged_attention', spec, sharding
    ),
  )
