"""Product with a quantized weight as a Pallas Triton kernel for NVIDIA GPUs.

A program multiplies some chunks of inputs with one tile of outputs. It reads
the numbers as they are stored and widens them in registers; a chunk has one
scale for each output, which multiplies the few sums instead of the many
weights. Several programs share the inputs of a tile, so that a small weight
occupies the device, too; the one that ends last adds their sums. With a gated
activation a program has the tile of both parts.

Legend:
- T rows, M rows with padding, P parts, of which a program has G
- K inputs, C groups of inputs, J inputs of a chunk, S splits
- N outputs, W block_outputs, L tiles of outputs
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program
from kernels_pallas import tiles as block_tiles
from kernels_pallas.quantized_matmul import tiles, triton_chunks
from kernels_pallas.swiglu import reference as gate

_MOST_FLOAT32_ROWS = 16  # more take minutes to compile
_MOST_OUTPUTS = 128
_MOST_SPLITS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(block_tiles.Config):
  """Tiles of the kernel."""

  # Outputs of a program, which divides N.
  block_outputs: int = block_tiles.power((32, 64, 128))
  # Programs that share the inputs of a tile.
  num_splits: int = block_tiles.number((1, 2, 4, 8, 16, 32))
  num_warps: int = block_tiles.power((4, 8), 4)  # warps of a program
  num_stages: int = block_tiles.number((2, 3, 4), 4)  # chunks in flight


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  tiles.check(x, values)
  if x.dtype == jnp.float32:
    block_tiles.check_most(len(x), _MOST_FLOAT32_ROWS, 'rows of float32')
  triton_chunks.check_sizes(values, scales)


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
  config = config or _default_config(num_results, num_inputs, num_outputs)
  block, num_splits = config.block_outputs, config.num_splits
  if num_outputs % block:
    raise ValueError(f'{block} outputs of a tile do not divide {num_outputs}')
  tiles_of_part = num_outputs // block
  num_tiles = num_results * tiles_of_part
  padded_rows = max(pl.next_power_of_2(num_rows), block_tiles.LEAST_SIDE)

  def tile_of(num_joined, num_lines):
    """One tile of outputs of some parts."""
    return pl.BlockSpec(
      (num_joined, num_lines, block),
      lambda tile, _: (tile // tiles_of_part, 0, tile % tiles_of_part),
    )

  totals = (num_splits, num_joined, padded_rows, block)
  counters, counter = last_program.counters(num_tiles, lambda tile, _: tile)
  out, _ = pl.pallas_call(
    functools.partial(
      _kernel,
      chunk_size=tiles.chunk_size_of(num_inputs, num_groups),
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
      # The programs of a tile share it.
      pl.BlockSpec((None, *totals), lambda tile, _: (tile, 0, 0, 0, 0)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((num_results, num_rows, num_outputs), x.dtype),
      jax.ShapeDtypeStruct((num_tiles, *totals), jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name='quantized_matmul',
  )(x, values, scales, counters)
  return jnp.moveaxis(out, 0, 1)


def _default_config(num_parts, num_inputs, num_outputs):
  """Returns tiles that occupy a device; not measured."""
  block = math.gcd(num_outputs, _MOST_OUTPUTS)
  num_tiles = num_parts * num_outputs // block
  splits = tiles.num_splits(num_tiles, num_inputs, _MOST_SPLITS)
  return Config(block_outputs=block, num_splits=splits)


def _kernel(
  # Inputs:
  x,  # [T, K]
  values,  # int8, int4 or float8_e4m3fn [G, K, W]
  scales,  # f32[G, C, W]
  num_done,  # i32[1]
  # Outputs:
  out,  # [T, W]
  totals,  # f32[S, G, M, W], partial sums
  *,
  chunk_size: int,
  activation: str | None,
  interpret: bool,
):
  num_rows, num_inputs = x.shape
  num_splits, num_joined, padded_rows, _ = totals.shape
  row = jnp.arange(padded_rows)
  is_row = (row < num_rows)[:, None]
  num_chunks = num_inputs // chunk_size
  share = pl.cdiv(num_chunks, num_splits)
  split = pl.program_id(1)

  start = split * share
  stop = jnp.minimum(start + share, num_chunks)
  write = functools.partial(_write, out, scales, row, is_row, activation)
  parts = []
  for i in range(num_joined):
    total = triton_chunks.add_chunks(
      x, row, is_row, values, scales, start, stop, chunk_size, (i,)
    )
    if num_splits == 1:
      parts.append(total)
    else:
      totals[split, i] = total
  if num_splits == 1:
    write(parts)
    return

  @pl.when(last_program.is_last(num_done, num_splits, interpret=interpret))
  def _():
    write([_sum_of(totals, i) for i in range(num_joined)])


def _write(out, scales, row, is_row, activation, parts):
  """Writes what the sums of parts f32[M, W] make."""
  if scales.shape[1] == 1:
    parts = [part * scales[i] for i, part in enumerate(parts)]
  total, *up = parts
  if activation:
    total = gate.gated_activation(total, *up, activation)
  places = row[:, None], jnp.arange(out.shape[1])[None]
  plgpu.store(out.at[places], total.astype(out.dtype), mask=is_row)


def _sum_of(totals, part: int) -> jax.Array:
  """Returns f32[M, W], what the splits of a part have together."""
  num_splits, _, *shape = totals.shape
  return jax.lax.fori_loop(
    0,
    num_splits,
    lambda split, total: total + totals[split, part],
    jnp.zeros(shape, jnp.float32),
  )
