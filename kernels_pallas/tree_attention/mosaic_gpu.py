"""Tree attention as a Pallas Mosaic GPU kernel for Hopper.

One launch. A cluster of programs, which the device runs together, shares the
visible rows of a kv head. Each copies tiles of keys and values by TMA while it
multiplies others with wgmma. After a barrier of the cluster each combines all
partial results for its share of the columns.

Partial results go to memory by TMA: the wait for such a copy ends when it can
be read anywhere, whereas the barrier's arrival orders nothing but the memory
of its own program.

Legend:
- B rows, T query tokens, S cache capacity
- G kv heads, Q query heads for each kv head, E head_dim, W mask words
- N rows of queries (T x Q with padding), R rows of a tile of them
- K cache rows of a tile, P splits, C columns of a product
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import tiles
from kernels_pallas.tree_attention import mask_words, mosaic_block

_MAX_COLUMNS = 128  # C; more do not fit into the registers of a warpgroup
_MAX_QUERY_ROWS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Sizes of the kernel; not measured."""

  # Programs that share the rows of a kv head. All devices run clusters of up
  # to 8.
  num_splits: int = tiles.power((2, 4, 8), 8)
  # Tiles of keys and of values in flight.
  num_stages: int = tiles.number((2, 3, 4), 2)


def check(
  queries_shape: tuple[int, ...],
  keys_shape: tuple[int, ...],
  tree_size: int,
  dtype: jax.typing.DTypeLike,
) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  _, num_tokens, _, num_groups, head_dim = queries_shape
  mask_words.check(dtype, num_tokens * num_groups, _MAX_QUERY_ROWS, tree_size)
  if dtype != jnp.bfloat16:
    raise NotImplementedError(f'dtype {dtype} is not bfloat16')
  if head_dim not in (64, 128, 256):
    raise NotImplementedError(f'head_dim {head_dim} is not 64, 128 or 256')
  if keys_shape[2] % mosaic_block.BLOCK_KV:
    raise NotImplementedError(
      f'{keys_shape[2]} cache rows are no multiple of {mosaic_block.BLOCK_KV}'
    )


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  window: int | None = None,
  config: Config | None = None,
) -> jax.Array:
  """See `reference.tree_attention`; raises NotImplementedError as `check`."""
  check(queries.shape, keys.shape, tree_mask.shape[2], queries.dtype)
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  # As many tiles as the shared memory holds.
  config = config or Config(num_stages=2 if head_dim == 256 else 4)
  used_rows = num_tokens * num_groups
  num_rows = pl.cdiv(used_rows, mosaic_block.ROWS) * mosaic_block.ROWS
  grouped = jnp.moveaxis(queries, 1, 2).reshape(
    batch, num_kv_heads, used_rows, head_dim
  )
  scalars, row_words = _small_inputs(
    prefix_lengths, tree_mask, positions, window, num_groups, num_rows
  )
  partial_shape = (batch, num_kv_heads, config.num_splits, num_rows)
  out, *_ = plgpu.kernel(
    functools.partial(
      _kernel,
      scale=scale,
      has_window=window is not None,
      tree_size=tree_mask.shape[2],
    ),
    out_type=[
      jax.ShapeDtypeStruct(
        (batch, num_kv_heads, num_rows, head_dim), queries.dtype
      ),
      jax.ShapeDtypeStruct((*partial_shape, head_dim), jnp.float32),
      jax.ShapeDtypeStruct(partial_shape, jnp.float32),
      jax.ShapeDtypeStruct(partial_shape, jnp.float32),
    ],
    scratch_types=_scratch(head_dim, config),
    grid=(batch, num_kv_heads, num_rows // mosaic_block.ROWS),
    grid_names=('row', 'head', 'tile'),
    cluster=(config.num_splits,),
    cluster_names=('split',),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    kernel_name='tree_attention',
  )(
    scalars,
    row_words,
    jnp.pad(grouped, ((0, 0), (0, 0), (0, num_rows - used_rows), (0, 0))),
    keys,
    values,
  )
  out = out[:, :, :used_rows].reshape(
    batch, num_kv_heads, num_tokens, num_groups, head_dim
  )
  return jnp.moveaxis(out, 2, 1)


def _scratch(head_dim, config):
  """Returns the types of the kernel's scratch."""
  stages = (config.num_stages, mosaic_block.BLOCK_KV, head_dim)
  columns = min(head_dim, _MAX_COLUMNS)
  return [
    plgpu.SMEM((mosaic_block.ROWS, head_dim), jnp.bfloat16),
    plgpu.SMEM(stages, jnp.bfloat16),
    plgpu.SMEM(stages, jnp.bfloat16),
    plgpu.SMEM((mosaic_block.ROWS, mosaic_block.BLOCK_KV), jnp.bfloat16),
    plgpu.SMEM((mosaic_block.ROWS, columns), jnp.float32),
    plgpu.SMEM((2, mosaic_block.ROWS), jnp.float32),
    plgpu.SMEM(
      (mosaic_block.ROWS, head_dim // config.num_splits), jnp.bfloat16
    ),
    plgpu.Barrier(num_barriers=1),
    plgpu.Barrier(num_barriers=config.num_stages),
    plgpu.Barrier(num_barriers=config.num_stages),
    plgpu.ClusterBarrier(collective_axes=('split',), num_barriers=1),
  ]


def _small_inputs(
  prefix_lengths, tree_mask, positions, window, num_groups, num_rows
):
  """Returns the `scalars` and `row_words` of the kernel."""
  first_rows = jnp.zeros_like(positions)
  if window is not None:
    first_rows = jnp.maximum(positions - (window - 1), 0)
  scalars = jnp.stack([prefix_lengths, first_rows.min(axis=1)], axis=1)
  words = jnp.moveaxis(mask_words.pack(tree_mask), 2, 1)
  of_tokens = jnp.concatenate([first_rows[:, None], words], axis=1)
  of_rows = jnp.repeat(of_tokens, num_groups, axis=2)
  padding = num_rows - of_rows.shape[2]
  return scalars, jnp.pad(of_rows, ((0, 0), (0, 0), (0, padding)))


def _kernel(
  # Inputs:
  scalars,  # i32[B, 2] rows of the prefix, first row that any token sees
  row_words,  # i32[B, 1 + W, N] first visible row, mask
  queries,  # [B, G, N, E]
  keys,  # [B, G, S, E]
  values,  # [B, G, S, E]
  # Outputs:
  out,  # [B, G, N, E]
  totals,  # f32[B, G, P, N, E] partial results
  maxima,  # f32[B, G, P, N]
  sums,  # f32[B, G, P, N]
  # Scratch:
  query_tile,  # [R, E]
  key_tiles,  # [stages, K, E]
  value_tiles,  # [stages, K, E]
  weight_tile,  # [R, K]
  total_tile,  # f32[R, C]
  stat_tile,  # f32[2, R]
  out_tile,  # [R, E / P]
  queries_here,  # [1] barrier
  keys_here,  # [stages] barriers
  values_here,  # [stages] barriers
  all_here,  # [1] barrier of the cluster
  *,
  scale: float,
  has_window: bool,
  tree_size: int,
):
  b, g, tile, split = map(jax.lax.axis_index, ('row', 'head', 'tile', 'split'))
  rows = pl.ds(tile * mosaic_block.ROWS, mosaic_block.ROWS)
  num_splits = totals.shape[2]
  prefix_length, first_row = scalars[b, 0], scalars[b, 1]
  end = jnp.minimum(prefix_length + tree_size, keys.shape[2])
  start, stop, num_partials = _blocks_of(split, num_splits, first_row, end)

  @pl.when(start < stop)
  def _():
    plgpu.copy_gmem_to_smem(
      queries.at[b, g, rows], query_tile, queries_here.at[0]
    )
    fetch_keys, fetch_values = (
      _fetching(source.at[b, g], tiles, here, start, stop)
      for source, tiles, here in (
        (keys, key_tiles, keys_here),
        (values, value_tiles, values_here),
      )
    )
    for stage in range(key_tiles.shape[0]):
      fetch_keys(start + stage)
      fetch_values(start + stage)
    plgpu.barrier_wait(queries_here.at[0])
    words = [row_words.at[b, word, rows] for word in range(row_words.shape[1])]
    add = functools.partial(
      mosaic_block.add_block,
      start=start,
      tiles=(query_tile, key_tiles, weight_tile, value_tiles),
      arrivals=(keys_here, values_here),
      fetches=(fetch_keys, fetch_values),
      scale=scale,
      first_rows=words[0] if has_window else None,
    )
    tree_block = jnp.clip(
      jax.lax.div(prefix_length, mosaic_block.BLOCK_KV), start, stop
    )
    carry = mosaic_block.nothing(keys.shape[3], total_tile.shape[1])
    # A block of the prefix alone needs no mask.
    carry = jax.lax.fori_loop(start, tree_block, add, carry)
    masked = functools.partial(add, mask=(words[1:], prefix_length, end))
    carry = jax.lax.fori_loop(tree_block, stop, masked, carry)
    mine = (b, g, split, rows)
    _write_partial(
      carry,
      (total_tile, stat_tile),
      (totals.at[mine], maxima.at[mine], sums.at[mine]),
    )

  plgpu.barrier_arrive(all_here.at[0])
  plgpu.barrier_wait(all_here.at[0])
  num_columns = keys.shape[3] // num_splits
  columns = pl.ds(split * num_columns, num_columns)
  combined = _combine(
    totals.at[b, g, :, rows, columns],
    maxima.at[b, g, :, rows],
    sums.at[b, g, :, rows],
    num_partials,
  )
  out_tile[...] = combined.astype(out_tile.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(out_tile, out.at[b, g, rows, columns])
  plgpu.wait_smem_to_gmem(0)


def _blocks_of(split, num_splits, first_row, end):
  """Returns this split's range of blocks, and how many splits have any."""
  first_block = jax.lax.div(first_row, mosaic_block.BLOCK_KV)
  end_block = pl.cdiv(end, mosaic_block.BLOCK_KV)
  share = jnp.maximum(pl.cdiv(end_block - first_block, num_splits), 1)
  start = first_block + split * share
  stop = jnp.minimum(start + share, end_block)
  return start, stop, pl.cdiv(end_block - first_block, share)


def _fetching(source, tiles, here, start, stop):
  """Returns a function that copies a block, if it is before `stop`."""

  def fetch(block):
    @pl.when(block < stop)
    def _():
      stage = jax.lax.rem(block - start, tiles.shape[0])
      place = pl.ds(block * mosaic_block.BLOCK_KV, mosaic_block.BLOCK_KV)
      plgpu.copy_gmem_to_smem(source.at[place], tiles.at[stage], here.at[stage])

  return fetch


def _write_partial(carry, tiles, partial):
  """Writes a partial result, and waits until all of the device can read it."""
  maximum, weight_sum, *total = carry
  total_tile, stat_tile = tiles
  totals, maxima, sums = partial
  stat_tile[0] = maximum
  stat_tile[1] = weight_sum
  for i, part in enumerate(total):
    total_tile[...] = part
    plgpu.commit_smem()
    columns = pl.ds(i * part.shape[1], part.shape[1])
    plgpu.copy_smem_to_gmem(total_tile, totals.at[:, columns])
    plgpu.wait_smem_to_gmem(0)
  plgpu.copy_smem_to_gmem(stat_tile.at[0], maxima)
  plgpu.copy_smem_to_gmem(stat_tile.at[1], sums)
  plgpu.wait_smem_to_gmem(0)


def _combine(totals, maxima, sums, num_partials):
  """Returns f32[R, columns] of the first partial results."""

  def add(other, carry):
    maximum, weight_sum, total = carry
    others_max = mosaic_block.load(maxima.at[other], mosaic_block.ROW_LAYOUT)
    new_max = jnp.maximum(maximum, others_max)
    decay, weight = jnp.exp(maximum - new_max), jnp.exp(others_max - new_max)
    added_weight = (
      mosaic_block.load(sums.at[other], mosaic_block.ROW_LAYOUT) * weight
    )
    added = mosaic_block.load(
      totals.at[other], mosaic_block.TILE_LAYOUT
    ) * mosaic_block.by_row(weight, total)
    return (
      new_max,
      weight_sum * decay + added_weight,
      total * mosaic_block.by_row(decay, total) + added,
    )

  num_columns = totals.shape[2]
  nothing = mosaic_block.nothing(num_columns, num_columns)
  _, weight_sum, total = jax.lax.fori_loop(0, num_partials, add, nothing)
  # A row that sees nothing gives zeros.
  weight_sum = jnp.where(weight_sum == 0, 1.0, weight_sum)
  return total / mosaic_block.by_row(weight_sum, total)
