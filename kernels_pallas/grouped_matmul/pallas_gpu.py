"""Product with quantized weights of experts as a Pallas Triton kernel.

A program multiplies a piece of rows, which are of one expert and lie in one
block, with a tile of its expert's outputs. Experts without rows are not read. A
tile is widened and multiplied as in `quantized_matmul`; pieces make enough
programs, so that none share their inputs.

Legend: R rows, B rows of a block, X experts, K inputs, N outputs, C groups of
inputs, W block_outputs, M pieces.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import tiles as block_tiles
from kernels_pallas.grouped_matmul import tiles
from kernels_pallas.quantized_matmul import float4, triton_chunks
from kernels_pallas.quantized_matmul import tiles as dense_tiles

_BLOCK_ROWS = block_tiles.LEAST_SIDE
_MOST_OUTPUTS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(block_tiles.Config):
  """Tiles of the kernel."""

  # Outputs of a program, which divides N.
  block_outputs: int = block_tiles.power((16, 32, 64, 128))
  num_warps: int = block_tiles.power((4, 8), 4)  # warps of a program
  num_stages: int = block_tiles.number((2, 3, 4), 4)  # chunks in flight


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  dense_tiles.check(x, values, tiles.MOST_ROWS)
  triton_chunks.check_sizes(values, scales)


def grouped_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  chosen: jax.Array,
  *,
  config: Config | None = None,
  interpret: bool = False,
) -> jax.Array:
  """See `api.grouped_matmul`; raises NotImplementedError as `check`."""
  check(x, values, scales)
  num_experts, num_inputs, num_outputs = values.shape
  # Not measured.
  config = config or Config(block_outputs=math.gcd(num_outputs, _MOST_OUTPUTS))
  block = config.block_outputs
  if num_outputs % block:
    raise ValueError(f'{block} outputs of a tile do not divide {num_outputs}')
  firsts, experts = tiles.pieces(chosen, num_experts, _BLOCK_ROWS)

  def whole(array):
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

  def tile_of(array):
    """One tile of outputs of all experts."""
    shape = (*array.shape[:-1], block)
    return pl.BlockSpec(shape, lambda tile, _: (*(0,) * (array.ndim - 1), tile))

  chunk_size = dense_tiles.chunk_size_of(num_inputs, scales.shape[1])
  out_shape = jax.ShapeDtypeStruct((len(x), num_outputs), x.dtype)
  return pl.pallas_call(
    functools.partial(_kernel, chunk_size=chunk_size),
    grid=(num_outputs // block, len(experts)),
    in_specs=[
      whole(firsts),
      whole(experts),
      whole(x),
      tile_of(values),
      tile_of(scales),
    ],
    out_specs=tile_of(out_shape),
    out_shape=out_shape,
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name='grouped_matmul',
  )(firsts, experts, x, values, scales)


def _kernel(
  # Inputs:
  firsts,  # i32[M + 1]
  experts,  # i32[M]
  x,  # [R, K]
  values,  # int8, int4 or float8_e4m3fn [X, K, W]
  scales,  # f32[X, C, W], or uint8
  # Output:
  out,  # [R, W]
  *,
  chunk_size: int,
):
  piece = pl.program_id(1)
  first, stop = firsts[piece], firsts[piece + 1]
  expert = experts[piece]
  row = first // _BLOCK_ROWS * _BLOCK_ROWS + jnp.arange(_BLOCK_ROWS)
  is_own = ((row >= first) & (row < stop))[:, None]
  none = jnp.zeros((), jnp.int32)
  num_chunks = jnp.where(first < stop, x.shape[1] // chunk_size, none)
  total = triton_chunks.add_chunks(
    x,
    row,
    is_own,
    values,
    scales,
    none,
    num_chunks,
    chunk_size,
    (expert,),
  )
  if scales.shape[1] == 1:
    total *= float4.wide(scales[expert])
  plgpu.store(
    out.at[row[:, None], jnp.arange(out.shape[1])[None]],
    total.astype(out.dtype),
    mask=is_own,
  )
