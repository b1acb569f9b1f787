"""Product with a quantized weight as a Pallas Mosaic GPU kernel for Hopper.

The weight is the left operand of wgmma and the rows are the right one: outputs
fill the 64 lines that a warpgroup multiplies at least, and 8 rows are enough
for the other side, where Triton pads them to 16.

TMA brings numbers as they are stored, and the rows, some chunks ahead. A
warpgroup widens a chunk in registers and leaves it in shared memory, where
wgmma reads it transposed. A chunk has one scale for each output, which
multiplies the few sums instead of the many weights. With a gated activation a
program has the tile of both parts.

A cluster of programs, which the device runs together, shares the inputs of a
tile. After a barrier of the cluster the first program adds all sums, in the
order of the programs. They go to memory by TMA, see `tree_attention`.

Legend:
- T rows, M rows with padding, P parts, of which a program has G
- K inputs, C groups of inputs, J inputs of a chunk, S splits
- N outputs, W outputs of a tile, L tiles of outputs
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import products
from kernels_pallas import tiles as block_tiles
from kernels_pallas.quantized_matmul import mosaic_chunk, tiles
from kernels_pallas.swiglu import reference as gate

_OUTPUTS = mosaic_chunk.OUTPUTS
_ROW_TILE = 8  # M is a multiple
_CHUNK_SIZES = (64, 128)  # J
_MOST_SPLITS = 8  # programs of a cluster that every device can run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(block_tiles.Config):
  """Sizes of the kernel; not measured."""

  # Programs that share the inputs of a tile. All devices run clusters of up
  # to 8.
  num_splits: int = block_tiles.power((1, 2, 4, 8))
  num_stages: int = block_tiles.number((2, 4, 6), 4)  # chunks in flight


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  tiles.check(x, values)
  products.check_dtype(x.dtype, ['bfloat16'])
  products.check_dtype(values.dtype, mosaic_chunk.LAYOUTS)
  num_inputs, num_outputs = values.shape[1:]
  if tiles.chunk_size_of(num_inputs, scales.shape[1]) not in _CHUNK_SIZES:
    raise NotImplementedError(
      f'{num_inputs} inputs in {scales.shape[1]} groups are no chunks of '
      f'{" or ".join(map(str, _CHUNK_SIZES))}'
    )
  block_tiles.check_multiple(num_outputs, _OUTPUTS, 'outputs')


def quantized_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *,
  activation: str | None = None,
  config: Config | None = None,
) -> jax.Array:
  """See `api.quantized_matmul`; raises NotImplementedError as `check`."""
  check(x, values, scales)
  num_rows, num_inputs = x.shape
  num_parts, num_groups, num_outputs = scales.shape
  num_joined = num_parts if activation else 1
  num_results = num_parts // num_joined
  num_tiles = num_outputs // _OUTPUTS
  config = config or _default_config(num_results * num_tiles, num_inputs)
  chunk_size = tiles.chunk_size_of(num_inputs, num_groups)
  padding = -num_rows % _ROW_TILE
  padded_rows = num_rows + padding
  stages = config.num_stages
  sums = (num_joined, _OUTPUTS, padded_rows)
  out, _ = plgpu.kernel(
    functools.partial(_kernel, activation=activation),
    out_type=[
      jax.ShapeDtypeStruct((num_results, padded_rows, num_outputs), x.dtype),
      jax.ShapeDtypeStruct(
        (num_results, num_tiles, config.num_splits, *sums), jnp.float32
      ),
    ],
    scratch_types=[
      plgpu.SMEM((stages, padded_rows, chunk_size), x.dtype),
      plgpu.SMEM((stages, num_joined, chunk_size, _OUTPUTS), values.dtype),
      plgpu.SMEM((chunk_size, _OUTPUTS), x.dtype),
      plgpu.SMEM(sums, jnp.float32),
      plgpu.SMEM((padded_rows, _OUTPUTS), x.dtype),
      plgpu.Barrier(num_barriers=stages, num_arrivals=2),
      plgpu.ClusterBarrier(collective_axes=('split',), num_barriers=1),
    ],
    grid=(num_results, num_tiles),
    grid_names=('result', 'tile'),
    cluster=(config.num_splits,),
    cluster_names=('split',),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    kernel_name='quantized_matmul',
  )(jnp.pad(x, ((0, padding), (0, 0))), values, scales)
  return jnp.moveaxis(out[:, :num_rows], 0, 1)


def _default_config(num_tiles, num_inputs):
  """Returns sizes that occupy a device; not measured."""
  splits = tiles.num_splits(num_tiles, num_inputs, _MOST_SPLITS)
  return Config(num_splits=1 << (splits.bit_length() - 1))


def _kernel(
  # Inputs:
  x,  # [M, K]
  values,  # int8 or int4 [P, K, N]
  scales,  # f32[P, C, N]
  # Outputs:
  out,  # [P / G, M, N]
  totals,  # f32[P / G, L, S, G, W, M], sums of each split
  # Scratch:
  row_tiles,  # [stages, M, J]
  value_tiles,  # [stages, G, J, W]
  wide_tile,  # [J, W]
  total_tile,  # f32[G, W, M]
  out_tile,  # [M, W]
  chunks_here,  # [stages] barriers
  all_here,  # [1] barrier of the cluster
  *,
  activation: str | None,
):
  result, tile, split = map(jax.lax.axis_index, ('result', 'tile', 'split'))
  num_joined, num_splits = value_tiles.shape[1], totals.shape[2]
  parts = pl.ds(result * num_joined, num_joined)
  outputs = pl.ds(tile * _OUTPUTS, _OUTPUTS)
  scales = scales.at[parts, :, outputs]
  num_chunks = x.shape[1] // wide_tile.shape[0]
  share = pl.cdiv(num_chunks, num_splits)
  start = jnp.minimum(split * share, num_chunks)
  stop = jnp.minimum(start + share, num_chunks)
  fetch = functools.partial(
    mosaic_chunk.fetch,
    start=start,
    stop=stop,
    sources=(x, values.at[parts, :, outputs]),
    tiles=(row_tiles, value_tiles),
    here=chunks_here,
  )
  for stage in range(value_tiles.shape[0]):
    fetch(start + stage)
  sums = jax.lax.fori_loop(
    start,
    stop,
    functools.partial(
      mosaic_chunk.add_chunk,
      start=start,
      fetch=fetch,
      tiles=(row_tiles, value_tiles, wide_tile),
      here=chunks_here,
      scales=scales,
    ),
    (mosaic_chunk.nothing(x.shape[0]),) * num_joined,
  )

  def write(sums):
    if scales.shape[1] == 1:
      sums = mosaic_chunk.scaled(sums, mosaic_chunk.load_scales(scales, 0))
    total, *up = sums
    if activation:
      total = gate.gated_activation(total, *up, activation)
    out_tile.transpose((1, 0))[...] = plgpu.layout_cast(
      total.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    _copy(out_tile, out.at[result, :, outputs])

  if num_splits == 1:
    write(sums)
    return
  for i, part in enumerate(sums):
    total_tile[i] = part
  _copy(total_tile, totals.at[result, tile, split])
  plgpu.barrier_arrive(all_here.at[0])
  plgpu.barrier_wait(all_here.at[0])

  @pl.when(split == 0)
  def _():
    write([_sum_of(totals.at[result, tile, :, i]) for i in range(num_joined)])


def _sum_of(totals):
  """Returns f32[W, M], what the splits of f32[S, W, M] have together."""

  def add(split, total):
    return total + mosaic_chunk.load(totals.at[split], mosaic_chunk.TILE_LAYOUT)

  num_splits, _, num_rows = totals.shape
  return jax.lax.fori_loop(0, num_splits, add, mosaic_chunk.nothing(num_rows))


def _copy(tile, target):
  """Copies a tile, and waits until all of the device can read it."""
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(tile, target)
  plgpu.wait_smem_to_gmem(0)
