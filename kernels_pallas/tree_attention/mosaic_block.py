"""A block of keys and values in the running softmax, by wgmma.

Legend: E head_dim, R rows of queries, K cache rows of a block, C columns of a
product.
"""

import inspect

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.tree_attention import mask_words, reference

ROWS = 64  # R, of a product by a warpgroup
BLOCK_KV = 64  # K
TILE_LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = TILE_LAYOUT.reduce(1)
# JAX 0.10 asks for an index; newer versions warn of one.
_INDEX = inspect.signature(plgpu.load).parameters.get('idx')
_NO_INDEX = ((),) if _INDEX and _INDEX.default is _INDEX.empty else ()


def nothing(num_columns, width):
  """Returns maxima f32[R], sums f32[R] and totals f32[R, width] of no rows."""

  def full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

  return (
    full((ROWS,), reference.MASKED_SCORE, ROW_LAYOUT),
    full((ROWS,), 0, ROW_LAYOUT),
    *(full((ROWS, width), 0, TILE_LAYOUT) for _ in range(num_columns // width)),
  )


def load(ref, layout, *, optimized=False):
  """Returns what is in memory, one piece for each thread of the layout.

  Args:
    ref: reference to it.
    layout: layout in the registers of the threads.
    optimized: whether only fast ways will do; else the compiler raises.
  """
  return plgpu.load(ref, *_NO_INDEX, layout=layout, optimized=optimized)


def by_row(vector, like):
  """Returns one number for each row, in all columns."""
  return jax.lax.broadcast_in_dim(vector, like.shape, [0])


def product(left, right, num_columns):
  """Returns f32[R, num_columns] of two tiles in shared memory."""

  def multiply(accumulator):
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  return pl.run_scoped(multiply, plgpu.ACC((ROWS, num_columns), jnp.float32))


def add_block(
  block,
  carry,
  *,
  start,
  tiles,
  arrivals,
  fetches,
  scale,
  first_rows,
  mask=None,
):
  """Adds one block to the running softmax.

  Args:
    block: number of the block.
    carry: maxima f32[R], sums f32[R] and totals f32[R, C] so far.
    start: number of the first block.
    tiles: references to the tiles of queries, keys, weights and values.
    arrivals: barriers at which keys and values arrive.
    fetches: functions that copy a block of keys and of values.
    scale: factor of the scores.
    first_rows: i32[R] first visible row, or None.
    mask: words i32[R], where they begin, and end of the rows; None where no
      mask is needed.
  """
  query_tile, key_tiles, weight_tile, value_tiles = tiles
  maximum, weight_sum, *total = carry
  num_stages = key_tiles.shape[0]
  stage = jax.lax.rem(block - start, num_stages)
  plgpu.barrier_wait(arrivals[0].at[stage])
  scores = product(query_tile, key_tiles.at[stage].transpose((1, 0)), BLOCK_KV)
  scores *= scale
  visible = _visible(block, scores, first_rows, mask)
  if visible is not None:
    scores = jnp.where(visible, scores, reference.MASKED_SCORE)
  new_max = jnp.maximum(maximum, scores.max(axis=1))
  weights = jnp.exp(scores - by_row(new_max, scores))
  if visible is not None:
    weights = jnp.where(visible, weights, 0.0)
  decay = jnp.exp(maximum - new_max)
  weight_tile[...] = weights.astype(weight_tile.dtype)
  plgpu.commit_smem()
  # Here all threads have read these keys, and the values of the block before.
  fetches[0](block + num_stages)

  @pl.when(block > start)
  def _():
    fetches[1](block - 1 + num_stages)

  plgpu.barrier_wait(arrivals[1].at[stage])
  added = (
    product(
      weight_tile,
      value_tiles.at[stage, :, pl.ds(i * part.shape[1], part.shape[1])],
      part.shape[1],
    )
    for i, part in enumerate(total)
  )
  return (
    new_max,
    weight_sum * decay + weights.sum(axis=1),
    *(
      old * by_row(decay, old) + new
      for old, new in zip(total, added, strict=True)
    ),
  )


def _visible(block, scores, first_rows, mask):
  """Returns bool[R, K], where a row may attend, or None: everywhere."""
  if first_rows is None and mask is None:
    return None
  column = block * BLOCK_KV + jax.lax.broadcasted_iota(
    jnp.int32, scores.shape, 1
  )
  if mask is None:
    return column >= by_row(load(first_rows, ROW_LAYOUT), column)
  words, prefix_length, end = mask
  visible = column < prefix_length
  for i, word in enumerate(words):
    shift = column - (prefix_length + i * mask_words.BITS)
    is_mine = (shift >= 0) & (shift < mask_words.BITS)
    # A shift by 32 or more is undefined.
    bit = jax.lax.shift_right_logical(
      by_row(load(word, ROW_LAYOUT), column), jnp.where(is_mine, shift, 0)
    )
    visible |= is_mine & ((bit & 1) == 1)
  visible &= column < end
  if first_rows is not None:
    visible &= column >= by_row(load(first_rows, ROW_LAYOUT), column)
  return visible
