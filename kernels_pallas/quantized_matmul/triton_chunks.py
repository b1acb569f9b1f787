"""The inputs of a quantized product, chunk by chunk, in Triton kernels.

Legend:
- T rows, M rows with padding
- K inputs, C groups of inputs, J inputs of a chunk
- N outputs, W outputs of a tile
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import products
from kernels_pallas import tiles as block_tiles
from kernels_pallas.quantized_matmul import float4, tiles

# Pallas has signed offsets of 32 bits up to this size, and then of 64 bits.
_NARROW_BYTES = 2**32


def check_sizes(values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError if a weight [P, K, N] cannot be parted."""
  num_inputs, num_outputs = values.shape[1:]
  num_groups = scales.shape[1]
  chunk_size = tiles.chunk_size_of(num_inputs, num_groups)
  is_power = chunk_size & (chunk_size - 1) == 0
  if chunk_size < block_tiles.LEAST_SIDE or not is_power:
    raise NotImplementedError(
      f'{num_inputs} inputs in {num_groups} groups are no chunks of a power '
      f'of two from {block_tiles.LEAST_SIDE}'
    )
  block_tiles.check_multiple(num_outputs, block_tiles.LEAST_SIDE, 'outputs')
  num_bytes = values.size * tiles.BITS[values.dtype.name] // 8
  if _NARROW_BYTES // 2 < num_bytes <= _NARROW_BYTES:
    raise NotImplementedError(
      f'offsets in {num_bytes} bytes of a weight do not fit into 31 bits'
    )


def add_chunks(
  x, row, is_row, values, scales, start, stop, chunk_size, part=()
) -> jax.Array:
  """Returns the product of some chunks of inputs f32[M, W].

  A scale for all inputs is left to the caller.

  Args:
    x: reference to rows [T, K].
    row: i32[M] of them to multiply.
    is_row: bool[M, 1] rows that are not padding.
    values: reference to the numbers [*part, K, W].
    scales: reference to f32[*part, C, W], or to uint8 for MXFP4, see `float4`.
    start: number of the first chunk.
    stop: number of the chunk after the last.
    chunk_size: J.
    part: scalars i32[], the place of the matrix among several.
  """
  num_groups, block = scales.shape[-2:]

  def add_chunk(chunk, total):
    first = chunk * chunk_size
    inputs = first + jnp.arange(chunk_size)
    weights = values[(*part, pl.ds(first, chunk_size))]
    if float4.is_used(scales):
      weights = float4.numbers(weights)
    rows = plgpu.load(x.at[row[:, None], inputs[None]], mask=is_row, other=0)
    product = plgpu.dot(
      rows, weights.astype(rows.dtype), precision=products.precision(rows.dtype)
    )
    if num_groups > 1:
      product *= float4.wide(scales[(*part, chunk)])[None]
    return total + product

  nothing = jnp.zeros((len(row), block), jnp.float32)
  return jax.lax.fori_loop(start, stop, add_chunk, nothing)
