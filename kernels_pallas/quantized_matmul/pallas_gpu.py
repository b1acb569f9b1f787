"""Product with a quantized weight as a Pallas Triton kernel for NVIDIA GPUs.

A program multiplies some chunks of inputs with one tile of outputs. It reads
the numbers as they are stored and widens them in registers; a chunk has one
scale for each output, which multiplies the few sums instead of the many
weights. Several programs share the inputs of a tile, so that a small weight
occupies the device, too; the one that ends last adds their sums. With a gated
activation a program has the tile of both parts.

Legend: T rows, M rows with padding, P parts, of which a program has G, K
inputs, N outputs, C groups of inputs, J inputs of a chunk, W block_outputs, L
tiles of outputs, S splits.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program
from kernels_pallas import tiles as block_tiles
from kernels_pallas.quantized_matmul import float4, tiles
from kernels_pallas.swiglu import reference as gate

_LEAST_SIDE = 16  # of a product in Triton
_MOST_SIDE = 128
_MOST_FLOAT32_ROWS = 16  # more take minutes to compile
_MOST_SPLITS = 16
_NUM_PROGRAMS = 256  # about two for each multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Tiles of the kernel.

  Attributes:
    block_outputs: outputs of a program, a power of two that divides N.
    num_splits: programs that share the inputs of a tile.
    num_warps: warps of a program.
    num_stages: chunks in flight.
    CANDIDATES: values that `tune_kernels` tries.
  """

  CANDIDATES: ClassVar[dict[str, tuple[int, ...]]] = {
    'block_outputs': (32, 64, 128),
    'num_splits': (1, 2, 4, 8, 16, 32),
    'num_warps': (4, 8),
    'num_stages': (2, 3, 4),
  }
  block_outputs: int
  num_splits: int
  num_warps: int = 4
  num_stages: int = 4

  def __post_init__(self):
    block_tiles.check_powers(self, 'block_outputs', 'num_warps')
    block_tiles.check_multiples(self, 1, 'num_splits', 'num_stages')


def default_config(num_parts: int, num_inputs: int, num_outputs: int) -> Config:
  """Returns tiles that occupy a device; not measured.

  Args:
    num_parts: number of parts that have programs of their own.
    num_inputs: K.
    num_outputs: N.
  """
  block = math.gcd(num_outputs, _MOST_SIDE)
  num_tiles = num_parts * num_outputs // block
  most = min(_MOST_SPLITS, pl.cdiv(num_inputs, _MOST_SIDE))
  return Config(
    block_outputs=block,
    num_splits=max(min(_NUM_PROGRAMS // num_tiles, most), 1),
  )


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it.

  Args:
    x: rows [T, K], of which shape and dtype are read.
    values: weight [P, K, N], of which shape and dtype are read.
    scales: scales [P, C, N], of which shape and dtype are read.
  """
  tiles.check(x.shape[0], x.dtype, values.dtype)
  if x.dtype == jnp.float32 and x.shape[0] > _MOST_FLOAT32_ROWS:
    raise NotImplementedError(
      f'{x.shape[0]} rows of float32, more than {_MOST_FLOAT32_ROWS}'
    )
  check_sizes(values, scales)


def check_sizes(values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError if a weight cannot be parted.

  Args:
    values: weight [P, K, N], of which shape and dtype are read.
    scales: scales [P, C, N], of which shape and dtype are read.
  """
  num_inputs, num_outputs = values.shape[1:]
  num_groups = scales.shape[1]
  chunk_size = chunk_size_of(num_inputs, num_groups)
  is_power = chunk_size & (chunk_size - 1) == 0
  if chunk_size < _LEAST_SIDE or not is_power:
    raise NotImplementedError(
      f'{num_inputs} inputs in {num_groups} groups are no chunks of a power '
      f'of two from {_LEAST_SIDE}'
    )
  if num_outputs % _LEAST_SIDE:
    raise NotImplementedError(
      f'{num_outputs} outputs are no multiple of {_LEAST_SIDE}'
    )


def quantized_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *,
  activation: str | None = None,
  config: Config | None = None,
  interpret: bool = False,
) -> jax.Array:
  """See `api.quantized_matmul`; raises NotImplementedError as `check`."""
  check(x, values, scales)
  num_rows, num_inputs = x.shape
  num_parts, _, num_outputs = values.shape
  num_groups = scales.shape[1]
  num_joined = num_parts if activation else 1
  num_results = num_parts // num_joined
  config = config or default_config(num_results, num_inputs, num_outputs)
  block, num_splits = config.block_outputs, config.num_splits
  if num_outputs % block:
    raise ValueError(f'{block} outputs of a tile do not divide {num_outputs}')
  tiles_of_part = num_outputs // block
  num_tiles = num_results * tiles_of_part
  padded_rows = max(pl.next_power_of_2(num_rows), _LEAST_SIDE)

  def tile_of(num_joined, num_lines):
    """One tile of outputs of some parts."""
    return pl.BlockSpec(
      (num_joined, num_lines, block),
      lambda tile, _: (tile // tiles_of_part, 0, tile % tiles_of_part),
    )

  totals_shape = (num_splits, num_joined, padded_rows, block)
  counters, counter = last_program.counters(num_tiles, lambda tile, _: tile)
  out, _ = pl.pallas_call(
    functools.partial(
      _kernel,
      chunk_size=chunk_size_of(num_inputs, num_groups),
      activation=activation,
      interpret=interpret,
    ),
    grid=(num_tiles, num_splits),
    in_specs=[
      pl.BlockSpec(x.shape, lambda *_: (0, 0)),
      tile_of(num_joined, num_inputs),
      tile_of(num_joined, num_groups),
      counter,
    ],
    out_specs=[
      tile_of(None, num_rows),
      pl.BlockSpec((None, *totals_shape), lambda tile, _: (tile, 0, 0, 0, 0)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((num_results, num_rows, num_outputs), x.dtype),
      jax.ShapeDtypeStruct((num_tiles, *totals_shape), jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name='quantized_matmul',
  )(x, values, scales, counters)
  return jnp.moveaxis(out, 0, 1)


def _kernel(
  # Inputs:
  x,  # [T, K]
  values,  # int8, int4 or float8_e4m3fn [G, K, W]
  scales,  # f32[G, C, W]
  num_done,  # i32[1]
  # Outputs:
  out,  # [T, W]
  totals,  # f32[S, G, M, W] partial sums
  *,
  chunk_size: int,
  activation: str | None,
  interpret: bool,
):
  num_rows, num_inputs = x.shape
  num_splits, num_joined, padded_rows, block = totals.shape
  row = jnp.arange(padded_rows)
  is_row = (row < num_rows)[:, None]
  num_chunks = num_inputs // chunk_size
  share = pl.cdiv(num_chunks, num_splits)
  split = pl.program_id(1)

  start = split * share
  stop = jnp.minimum(start + share, num_chunks)
  for i in range(num_joined):
    totals[split, i] = add_chunks(
      x, row, is_row, values, scales, start, stop, chunk_size, (i,)
    )

  def sum_of(part):
    total = jax.lax.fori_loop(
      0,
      num_splits,
      lambda other, total: total + totals[other, part],
      jnp.zeros((padded_rows, block), jnp.float32),
    )
    return total * scales[part] if scales.shape[1] == 1 else total

  @pl.when(last_program.is_last(num_done, num_splits, interpret=interpret))
  def _():
    total, *up = map(sum_of, range(num_joined))
    if activation:
      total = gate.gated_activation(total, *up, activation)
    plgpu.store(
      out.at[row[:, None], jnp.arange(block)[None]],
      total.astype(out.dtype),
      mask=is_row,
    )


def add_chunks(
  x, row, is_row, values, scales, start, stop, chunk_size, part=()
) -> jax.Array:
  """Returns the product of some chunks of inputs: f32[M, W].

  A scale for all inputs is left to the caller.

  Args:
    x: reference to the rows [T, K].
    row: numbers i32[M] of the rows to multiply.
    is_row: bool[M, 1], false where zeros take the place of a row.
    values: reference to the numbers [*part, K, W].
    scales: reference to f32[*part, C, W], or to uint8 for MXFP4, see `float4`.
    start: number of the first chunk.
    stop: number of the chunk behind the last.
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
    product = plgpu.dot(
      plgpu.load(x.at[row[:, None], inputs[None]], mask=is_row, other=0),
      weights.astype(x.dtype),
      precision=tiles.precision(x.dtype),
    )
    if num_groups == 1:
      return total + product
    return total + product * float4.wide(scales[(*part, chunk)])[None]

  nothing = jnp.zeros((len(row), block), jnp.float32)
  return jax.lax.fori_loop(start, stop, add_chunk, nothing)


def chunk_size_of(num_inputs: int, num_groups: int) -> int:
  """Returns J: a group, or where there is one only a divisor of it."""
  if num_groups > 1:
    return num_inputs // num_groups
  return math.gcd(num_inputs, _MOST_SIDE)
