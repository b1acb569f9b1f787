"""Product with a quantized weight as a Pallas Mosaic GPU kernel for Hopper.

The weight is the left, wide operand of wgmma, and the few rows are the columns
of the result: so 8 rows are no more work than 8, where Triton pads them to 16,
and the outputs fill the 64 rows that a warpgroup multiplies at least.

TMA brings numbers as they are stored, the rows and the scales, some chunks
ahead. A warpgroup widens a chunk to bfloat16 in registers and leaves it in
shared memory, where wgmma reads it transposed. A chunk has one scale for each
output, which multiplies the few sums instead of the many weights. A cluster of
programs, which the device runs together, shares the inputs of a tile. Behind a
barrier of the cluster the first of them adds all sums in the order of the
programs. As in `tree_attention`, they travel through memory by TMA.

Legend:
- T rows, M rows with padding, P parts, of which a program has G
- K inputs, C groups of inputs, J inputs of a chunk, S splits
- N outputs, W outputs of a tile, L tiles of outputs
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import tiles as block_tiles
from kernels_pallas.quantized_matmul import tiles
from kernels_pallas.swiglu import reference as gate
from kernels_pallas.tree_attention import mosaic_block

_OUTPUTS = 64  # W, of a product by a warpgroup
_ROW_TILE = 8  # rows of a product are a multiple
_MOST_INPUTS = 128  # J
_CHUNK_SIZES = (32, 64, 128)
_MOST_SPLITS = 8  # all devices run clusters of so many programs
_NUM_PROGRAMS = 256  # about two for each multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes of the kernel; not measured.

  Attributes:
    num_splits: programs that share the inputs of a tile, a power of two. All
      devices run clusters of up to 8.
    num_stages: chunks in flight.
    CANDIDATES: values that `tune_kernels` tries.
  """

  CANDIDATES: ClassVar[dict[str, tuple[int, ...]]] = {
    'num_splits': (1, 2, 4, 8),
    'num_stages': (2, 4, 6),
  }
  num_splits: int
  num_stages: int = 4

  def __post_init__(self):
    block_tiles.check_powers(self, 'num_splits')
    block_tiles.check_multiples(self, 1, 'num_stages')


def default_config(num_parts: int, num_inputs: int, num_outputs: int) -> Config:
  """Returns sizes that occupy a device; not measured.

  Args:
    num_parts: number of parts that have programs of their own.
    num_inputs: K.
    num_outputs: N.
  """
  num_tiles = num_parts * num_outputs // _OUTPUTS
  most = min(_MOST_SPLITS, pl.cdiv(num_inputs, _MOST_INPUTS))
  splits = max(min(_NUM_PROGRAMS // num_tiles, most), 1)
  return Config(num_splits=1 << (splits.bit_length() - 1))


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it.

  Args:
    x: rows [T, K], of which shape and dtype are read.
    values: weight [P, K, N], of which shape and dtype are read.
    scales: scales [P, C, N], of which shape and dtype are read.
  """
  tiles.check(x.shape[0], x.dtype, values.dtype)
  if x.dtype != jnp.bfloat16:
    raise NotImplementedError(f'{x.dtype} is not bfloat16')
  if values.dtype not in (jnp.int8, jnp.int4):
    raise NotImplementedError(f'{values.dtype} is neither int8 nor int4')
  num_inputs, num_outputs = values.shape[1:]
  if _chunk_size_of(num_inputs, scales.shape[1]) not in _CHUNK_SIZES:
    raise NotImplementedError(
      f'{num_inputs} inputs in {scales.shape[1]} groups are no chunks of '
      f'{", ".join(map(str, _CHUNK_SIZES))}'
    )
  if num_outputs % _OUTPUTS:
    raise NotImplementedError(
      f'{num_outputs} outputs are no multiple of {_OUTPUTS}'
    )


def _chunk_size_of(num_inputs: int, num_groups: int) -> int:
  """Returns J: a group, or where there is one only a divisor of it."""
  if num_groups > 1:
    return num_inputs // num_groups
  return math.gcd(num_inputs, _MOST_INPUTS)


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
  config = config or default_config(num_results, num_inputs, num_outputs)
  chunk_size = _chunk_size_of(num_inputs, num_groups)
  padding = -num_rows % _ROW_TILE
  padded_rows = num_rows + padding
  num_tiles = num_outputs // _OUTPUTS
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
      plgpu.SMEM((config.num_stages, padded_rows, chunk_size), x.dtype),
      plgpu.SMEM(
        (config.num_stages, num_joined, chunk_size, _OUTPUTS), values.dtype
      ),
      plgpu.SMEM((2, chunk_size, _OUTPUTS), x.dtype),
      plgpu.SMEM(sums, jnp.float32),
      plgpu.SMEM((padded_rows, _OUTPUTS), x.dtype),
      plgpu.Barrier(num_barriers=config.num_stages),
      plgpu.Barrier(num_barriers=config.num_stages),
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
  wide_tiles,  # [2, J, W]
  total_tile,  # f32[G, W, M]
  out_tile,  # [M, W]
  rows_here,  # [stages] barriers
  values_here,  # [stages] barriers
  all_here,  # [1] barrier of the cluster
  *,
  activation: str | None,
):
  result, tile, split = map(jax.lax.axis_index, ('result', 'tile', 'split'))
  num_stages, num_joined, chunk_size, _ = value_tiles.shape
  num_splits = totals.shape[2]
  parts = pl.ds(result * num_joined, num_joined)
  outputs = pl.ds(tile * _OUTPUTS, _OUTPUTS)
  num_chunks = x.shape[1] // chunk_size
  share = pl.cdiv(num_chunks, num_splits)
  start = jnp.minimum(split * share, num_chunks)
  stop = jnp.minimum(start + share, num_chunks)

  def fetch(chunk, source_fn, tiles, here):
    @pl.when(chunk < stop)
    def _():
      stage = jax.lax.rem(chunk - start, num_stages)
      inputs = pl.ds(chunk * chunk_size, chunk_size)
      plgpu.copy_gmem_to_smem(
        source_fn(inputs), tiles.at[stage], here.at[stage]
      )

  fetch_rows = functools.partial(
    fetch,
    source_fn=lambda inputs: x.at[:, inputs],
    tiles=row_tiles,
    here=rows_here,
  )
  fetch_values = functools.partial(
    fetch,
    source_fn=lambda inputs: values.at[parts, inputs, outputs],
    tiles=value_tiles,
    here=values_here,
  )
  for stage in range(num_stages):
    fetch_rows(start + stage)
    fetch_values(start + stage)

  def scales_of(i, group):
    return _by_row(
      scales.at[result * num_joined + i, group, outputs], x.shape[0]
    )

  def add_chunk(chunk, sums):
    stage = jax.lax.rem(chunk - start, num_stages)
    plgpu.barrier_wait(values_here.at[stage])
    plgpu.barrier_wait(rows_here.at[stage])
    added = []
    for i in range(num_joined):
      # Others may still multiply with the tile before.
      wide_tile = wide_tiles.at[jax.lax.rem(chunk * num_joined + i, 2)]
      wide_tile[...] = value_tiles[stage, i].astype(wide_tiles.dtype)
      plgpu.commit_smem()
      if i == 0:
        # Here all threads have multiplied the rows of the chunk before.
        @pl.when(chunk > start)
        def _():
          fetch_rows(chunk - 1 + num_stages)

      product = mosaic_block._product(
        wide_tile.transpose((1, 0)),
        row_tiles.at[stage].transpose((1, 0)),
        x.shape[0],
      )
      if scales.shape[1] > 1:
        product *= scales_of(i, chunk)
      added.append(product)
    fetch_values(chunk + num_stages)
    return tuple(a + b for a, b in zip(sums, added, strict=True))

  zeros = plgpu.layout_cast(
    jnp.zeros(total_tile.shape[1:], jnp.float32), mosaic_block.TILE_LAYOUT
  )
  sums = jax.lax.fori_loop(start, stop, add_chunk, (zeros,) * num_joined)
  for i, part in enumerate(sums):
    total_tile[i] = part
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(total_tile, totals.at[result, tile, split])
  plgpu.wait_smem_to_gmem(0)
  plgpu.barrier_arrive(all_here.at[0])
  plgpu.barrier_wait(all_here.at[0])

  @pl.when(split == 0)
  def _():
    parts = [
      _sum_of(totals.at[result, tile, :, i], zeros) for i in range(num_joined)
    ]
    if scales.shape[1] == 1:
      parts = [part * scales_of(i, 0) for i, part in enumerate(parts)]
    total, *up = parts
    if activation:
      total = gate.gated_activation(total, *up, activation)
    out_tile.transpose((1, 0))[...] = plgpu.layout_cast(
      total.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_tile, out.at[result, :, outputs])
    plgpu.wait_smem_to_gmem(0)


def _by_row(vector, num_columns):
  loaded = mosaic_block.load(vector, mosaic_block.ROW_LAYOUT)
  return jax.lax.broadcast_in_dim(loaded, (len(loaded), num_columns), [0])


def _sum_of(totals, zeros):
  """Returns f32[W, M], what the splits of f32[S, W, M] have together."""
  return jax.lax.fori_loop(
    0,
    totals.shape[0],
    lambda split, total: (
      total + mosaic_block.load(totals.at[split], mosaic_block.TILE_LAYOUT)
    ),
    zeros,
  )
