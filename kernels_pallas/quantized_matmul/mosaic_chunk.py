"""A chunk of inputs of a quantized product, by wgmma.

Legend: M rows, J inputs of a chunk, W outputs of a tile, C groups of inputs, G
parts of a program.
"""

import inspect

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

OUTPUTS = 64  # W, of a product by a warpgroup
TILE_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = TILE_LAYOUT.reduce(1)
# JAX 0.10 asks for an index; newer versions warn of one.
_INDEX = inspect.signature(plgpu.load).parameters.get('idx')
_NO_INDEX = ((),) if _INDEX and _INDEX.default is _INDEX.empty else ()
# Where a thread has 4 bytes of numbers side by side.
LAYOUTS = {
  'int8': plgpu.Layout.WGMMA_UPCAST_2X,
  'int4': plgpu.Layout.WGMMA_UPCAST_4X,
}


def fetch(chunk, *, start, stop, sources, tiles, here):
  """Copies the rows and the numbers of a chunk, if it is before `stop`."""

  @pl.when(chunk < stop)
  def _():
    (rows, values), (row_tiles, value_tiles) = sources, tiles
    num_stages, _, chunk_size = row_tiles.shape
    stage = jax.lax.rem(chunk - start, num_stages)
    inputs = pl.ds(chunk * chunk_size, chunk_size)
    for source, tile in (
      (rows.at[:, inputs], row_tiles.at[stage]),
      (values.at[:, inputs], value_tiles.at[stage]),
    ):
      plgpu.copy_gmem_to_smem(source, tile, here.at[stage])


def add_chunk(chunk, sums, *, start, fetch, tiles, here, scales):
  """Returns the sums f32[W, M] of the parts with the products of a chunk.

  Args:
    chunk: number of the chunk.
    sums: sums so far.
    start: number of the first chunk.
    fetch: function that copies a chunk.
    tiles: references to the tiles of rows and of numbers, and to a wide one.
    here: barriers at which rows and numbers arrive.
    scales: reference to f32[G, C, W].
  """
  row_tiles, value_tiles, wide_tile = tiles
  num_stages = value_tiles.shape[0]
  stage = jax.lax.rem(chunk - start, num_stages)
  is_grouped = scales.shape[1] > 1
  # They arrive while this waits for the chunk.
  factors = load_scales(scales, chunk) if is_grouped else None
  plgpu.barrier_wait(here.at[stage])
  added = []
  for i in range(len(sums)):
    numbers = load(
      value_tiles.at[stage, i], LAYOUTS[value_tiles.dtype.name], optimized=True
    )
    # Before that Pallas waits for all threads, which may still multiply.
    wide_tile[...] = numbers.astype(wide_tile.dtype)
    plgpu.commit_smem()
    if i == 0:
      # Here all threads have multiplied the chunk before.
      @pl.when(chunk > start)
      def _():
        fetch(chunk - 1 + num_stages)

    added.append(
      _product(
        wide_tile.transpose((1, 0)),
        row_tiles.at[stage].transpose((1, 0)),
        row_tiles.shape[1],
      )
    )
  if is_grouped:
    added = scaled(added, factors)
  return tuple(total + a for total, a in zip(sums, added, strict=True))


def load(ref, layout, *, optimized=False):
  """Returns what is in memory, one piece for each thread of the layout.

  Args:
    ref: reference to it.
    layout: layout in the registers of the threads.
    optimized: whether only fast ways will do; else the compiler raises.
  """
  return plgpu.load(ref, *_NO_INDEX, layout=layout, optimized=optimized)


def _product(left, right, num_columns):
  """Returns f32[W, num_columns] of two tiles in shared memory."""

  def multiply(accumulator):
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  return pl.run_scoped(multiply, plgpu.ACC((OUTPUTS, num_columns), jnp.float32))


def nothing(num_rows):
  """Returns sums f32[W, M] of no chunks."""
  zeros = jnp.zeros((OUTPUTS, num_rows), jnp.float32)
  return plgpu.layout_cast(zeros, TILE_LAYOUT)


def load_scales(scales, group):
  """Returns f32[W] of each part, from a reference to f32[G, C, W]."""
  return [
    load(scales.at[i, group], _ROW_LAYOUT) for i in range(scales.shape[0])
  ]


def scaled(sums, factors):
  """Returns sums f32[W, M] times factors f32[W], of each part."""
  return [
    part * jax.lax.broadcast_in_dim(factor, part.shape, [0])
    for part, factor in zip(sums, factors, strict=True)
  ]
