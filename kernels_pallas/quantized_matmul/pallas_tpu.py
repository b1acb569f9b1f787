"""Product with a quantized weight as a Pallas kernel for TPUs.

A program makes one tile of outputs. The numbers of all inputs come to VMEM as
they are stored, over the double-buffered copies of the pipeline, and are
widened chunk by chunk on their way to the matrix unit. A chunk has one scale
for each output, which multiplies the few sums instead of the many weights.

Legend: T rows, P parts, K inputs, N outputs, C groups of inputs, H chunks, J
inputs of a chunk, W block_outputs.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import products
from kernels_pallas import tiles as block_tiles
from kernels_pallas.quantized_matmul import float4, tiles
from kernels_pallas.swiglu import reference as gate

_ROW_TILE = 16  # of a register of bfloat16
_MOST_INPUTS = 512  # of a chunk
_UNROLL = 8
_MOST_TILES = 4  # of 128 outputs, whose sums stay in registers
# Chunks are whole tiles of memory.
_CHUNK_MULTIPLE = {'int8': 32, 'int4': 64, 'float8_e4m3fn': 32}
_VMEM_BYTES = 14 * 2**20  # of 16 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(block_tiles.Config):
  """Tiles of the kernel."""

  # Outputs of a program.
  block_outputs: int = block_tiles.number(
    (128, 256, 512, 1024), multiple=block_tiles.LANES
  )


def default_config(values: jax.Array) -> Config:
  """Returns tiles with about 1 MiB of weights [P, K, N]; not measured."""
  _, num_inputs, num_outputs = values.shape
  tile_bytes = (
    num_inputs * block_tiles.LANES * tiles.BITS[values.dtype.name] // 8
  )
  most = min(_MOST_TILES, pl.cdiv(num_outputs, block_tiles.LANES))
  num_tiles = min(max(2**20 // tile_bytes, 1), most)
  return Config(block_outputs=num_tiles * block_tiles.LANES)


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  tiles.check(x, values)
  check_tile(padded_rows(x.shape[0]), x.dtype, values, scales)


def check_tile(
  num_rows: int,
  dtype: jax.typing.DTypeLike,
  values: jax.Array,
  scales: jax.Array,
) -> None:
  """Raises NotImplementedError if a tile of outputs of rows cannot be made."""
  num_inputs = values.shape[1]
  if chunk_size_of(values, scales) is None:
    raise NotImplementedError(
      f'{num_inputs} inputs in {scales.shape[1]} groups are no chunks of a '
      f'multiple of {_CHUNK_MULTIPLE[values.dtype.name]}'
    )
  config = default_config(values)
  weight_bytes = num_inputs * config.block_outputs
  weight_bytes = weight_bytes * tiles.BITS[values.dtype.name] // 8
  row_bytes = num_rows * num_inputs * jnp.dtype(dtype).itemsize
  # Both are buffered twice.
  if 2 * (weight_bytes + row_bytes) > _VMEM_BYTES:
    raise NotImplementedError(f'{num_inputs} inputs do not fit into VMEM')


def quantized_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *,
  activation: str | None = None,
  config: Config | None = None,
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """See `api.quantized_matmul`; raises NotImplementedError as `check`."""
  check(x, values, scales)
  num_rows, num_inputs = x.shape
  num_parts, _, num_outputs = values.shape
  num_groups = scales.shape[1]
  config = config or default_config(values)
  chunks = chunks_of(x, padded_rows(num_rows), chunk_size_of(values, scales))

  def tile_of(num_sublanes):
    return pl.BlockSpec(
      (None, num_sublanes, config.block_outputs), lambda p, n: (p, 0, n)
    )

  out = pl.pallas_call(
    _kernel,
    grid=(num_parts, pl.cdiv(num_outputs, config.block_outputs)),
    in_specs=[
      pl.BlockSpec(chunks.shape, lambda p, n: (0, 0, 0)),
      tile_of(num_inputs),
      tile_of(num_groups),
    ],
    out_specs=tile_of(chunks.shape[1]),
    out_shape=jax.ShapeDtypeStruct(
      (num_parts, chunks.shape[1], num_outputs), x.dtype
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel')
    ),
    interpret=interpret,
    name='quantized_matmul',
  )(chunks, values, scales)
  parts = out[:, :num_rows]
  if activation:
    return gate.gated_activation(*parts, activation)[:, None]
  return jnp.moveaxis(parts, 0, 1)


def _kernel(
  # Inputs:
  chunks,  # [H, T, J]
  values,  # int8, int4 or float8_e4m3fn [K, W]
  scales,  # f32[C, W]
  # Output:
  out,  # [T, W]
):
  out[...] = multiply_tile(chunks, values, scales).astype(out.dtype)


def multiply_tile(chunks, values, scales) -> jax.Array:
  """Returns the product with a tile of outputs: f32[T, W].

  Args:
    chunks: reference to the rows [H, T, J].
    values: reference to the numbers [K, W].
    scales: reference to f32[C, W], or to uint8 for MXFP4, see `float4`.
  """
  if float4.is_used(scales):
    return _multiply_float4(chunks, values, scales)
  num_chunks, num_rows, chunk_size = chunks.shape
  is_grouped = scales.shape[0] > 1

  def add_chunk(chunk, total):
    rows = pl.ds(pl.multiple_of(chunk * chunk_size, chunk_size), chunk_size)
    part = products.dot(chunks[chunk], values[rows].astype(chunks.dtype))
    return total + (part * scales[pl.ds(chunk, 1)] if is_grouped else part)

  total = jnp.zeros((num_rows, values.shape[1]), jnp.float32)
  # Products of several chunks overlap.
  total = jax.lax.fori_loop(
    0, num_chunks, add_chunk, total, unroll=min(num_chunks, _UNROLL)
  )
  return total if is_grouped else total * scales[...]


def _multiply_float4(chunks, values, scales):
  """Scales weights, as groups of 32 are too few inputs for a product.

  Their product with a power of two is exact in bfloat16, too.
  """
  num_chunks, num_rows, chunk_size = chunks.shape
  width = values.shape[1]
  num_groups = scales.shape[0] // num_chunks
  powers = float4.wide(scales[...])
  total = jnp.zeros((num_rows, width), jnp.float32)
  for chunk in range(num_chunks):
    own = powers[chunk * num_groups : (chunk + 1) * num_groups]
    own = jnp.broadcast_to(
      own[:, None], (num_groups, chunk_size // num_groups, width)
    ).reshape(chunk_size, width)
    numbers = float4.numbers(values[pl.ds(chunk * chunk_size, chunk_size)])
    total += products.dot(chunks[chunk], (numbers * own).astype(chunks.dtype))
  return total


def chunks_of(x: jax.Array, num_rows: int, size: int) -> jax.Array:
  """Returns rows [T, K], padded with zeros: [H, num_rows, size].

  So a chunk is found by a leading index, whatever its size.
  """
  x = jnp.pad(x, ((0, num_rows - len(x)), (0, 0)))
  return jnp.moveaxis(x.reshape(num_rows, -1, size), 1, 0)


def chunk_size_of(values: jax.Array, scales: jax.Array) -> int | None:
  """Returns J: a group, or where there is one only a divisor of it.

  With MXFP4 it is several groups. It is None where there is no such number.
  """
  num_inputs, num_groups = values.shape[1], scales.shape[1]
  multiple = _CHUNK_MULTIPLE[values.dtype.name]
  if num_groups > 1 and not float4.is_used(scales):
    sizes = [num_inputs // num_groups]
  else:
    sizes = [
      n for n in range(multiple, _MOST_INPUTS + 1) if num_inputs % n == 0
    ]
  return max((n for n in sizes if n % multiple == 0), default=None)


def padded_rows(num_rows: int) -> int:
  """Returns the number of rows in whole registers."""
  return pl.cdiv(num_rows, _ROW_TILE) * _ROW_TILE
