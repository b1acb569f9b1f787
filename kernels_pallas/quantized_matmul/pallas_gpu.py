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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program
from kernels_pallas import tiles as block_tiles
from kernels_pallas.quantized_matmul import tiles, triton_chunks
from kernels_pallas.swiglu import reference as gate

_MOST_FLOAT32_ROWS = 16  # more take minutes to compile
_MOST_SPLITS = 16
_NUM_PROGRAMS = 256  # about two for each multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(block_tiles.Config):
  """Tiles of the kernel."""

  # Outputs of a program, which divides N.
  block_outputs: int = block_tiles.power((32, 64, 128))
  # Programs that share the inputs of a tile.
  num_splits: int = block_tiles.number((1, 2, 4, 8, 16, 32))
  num_warps: int = block_tiles.power((4, 8), 4)  # warps of a program
  num_stages: int = block_tiles.number((2, 3, 4), 4)  # chunks in flight


def default_config(num_parts: int, num_inputs: int, num_outputs: int) -> Config:
  """Returns tiles that occupy a device; not measured.

  Args:
    num_parts: number of parts that have programs of their own.
    num_inputs: K.
    num_outputs: N.
  """
  block = math.gcd(num_outputs, triton_chunks.MOST_SIDE)
  num_tiles = num_parts * num_outputs // block
  most = min(_MOST_SPLITS, pl.cdiv(num_inputs, triton_chunks.MOST_SIDE))
  return Config(
    block_outputs=block,
    num_splits=max(min(_NUM_PROGRAMS // num_tiles, most), 1),
  )


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  tiles.check(x.shape[0], x.dtype, values.dtype)
  if x.dtype == jnp.float32 and x.shape[0] > _MOST_FLOAT32_ROWS:
    raise NotImplementedError(
      f'{x.shape[0]} rows of float32, more than {_MOST_FLOAT32_ROWS}'
    )
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
  product, *_ = launch(
    'quantized_matmul',
    [x],
    values,
    scales,
    activation=activation,
    config=config,
    interpret=interpret,
  )
  return product


def launch(
  name: str,
  rows: Sequence[jax.Array],
  values: jax.Array,
  scales: jax.Array,
  *,
  activation: str | None,
  config: Config | None,
  interpret: bool,
  epsilon: float | None = None,
) -> list[jax.Array]:
  """Launches the kernel.

  Args:
    name: name of the launch.
    rows: x [T, K]. With a norm, what is added to x [T, K], and the scale of
      the norm f32[K], too.
    values: weight [P, K, N].
    scales: scales [P, C, N].
    activation: gate that joins the parts, or None.
    config: tiles; None for the defaults.
    interpret: whether the interpreter runs it.
    epsilon: number that is added to the mean square; None for no norm.

  Returns:
    The product [T, P, N], or [T, 1, N] with an activation; with a norm, the
    sum of both rows [T, K], too.
  """
  x = rows[0]
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
  padded_rows = max(pl.next_power_of_2(num_rows), triton_chunks.LEAST_SIDE)

  def whole(array):
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

  def of_tile(*shape):
    """What the programs of a tile share."""
    return pl.BlockSpec(
      (None, *shape), lambda tile, _: (tile, *(0 for _ in shape))
    )

  def tile_of(num_joined, num_lines):
    """One tile of outputs of some parts."""
    return pl.BlockSpec(
      (num_joined, num_lines, block),
      lambda tile, _: (tile // tiles_of_part, 0, tile % tiles_of_part),
    )

  totals = (num_splits, num_joined, padded_rows, block)
  squares = (num_splits, padded_rows)
  partial_sums = [totals] if epsilon is None else [totals, squares]
  sums = [] if epsilon is None else [x]
  counters, counter = last_program.counters(num_tiles, lambda tile, _: tile)
  out, *others = pl.pallas_call(
    functools.partial(
      _kernel,
      chunk_size=triton_chunks.chunk_size_of(num_inputs, num_groups),
      activation=activation,
      epsilon=epsilon,
      interpret=interpret,
    ),
    grid=(num_tiles, num_splits),
    in_specs=[
      *map(whole, rows),
      tile_of(num_joined, num_inputs),
      tile_of(num_joined, num_groups),
      counter,
    ],
    out_specs=[
      tile_of(None, num_rows),
      *map(whole, sums),
      *(of_tile(*shape) for shape in partial_sums),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((num_results, num_rows, num_outputs), x.dtype),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sums),
      *(
        jax.ShapeDtypeStruct((num_tiles, *shape), jnp.float32)
        for shape in partial_sums
      ),
    ],
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name=name,
  )(*rows, values, scales, counters)
  return [jnp.moveaxis(out, 0, 1), *others[: len(sums)]]


def _kernel(
  # Inputs:
  # x [T, K]; with a norm, what is added to it [T, K], and the scale f32[K]
  # values int8, int4 or float8_e4m3fn [G, K, W]
  # scales f32[G, C, W]
  # num_done i32[1]
  # Outputs:
  # out [T, W]; with a norm, the sum of both rows [T, K]
  # totals f32[S, G, M, W], partial sums; with a norm, of squares f32[S, M]
  *refs,
  chunk_size: int,
  activation: str | None,
  epsilon: float | None,
  interpret: bool,
):
  if epsilon is None:
    x, values, scales, num_done, out, totals = refs
  else:
    x, added, norm, values, scales, num_done, out, summed, totals, squares = (
      refs
    )
  num_rows, num_inputs = x.shape
  num_splits, num_joined, padded_rows, _ = totals.shape
  row = jnp.arange(padded_rows)
  is_row = (row < num_rows)[:, None]
  num_chunks = num_inputs // chunk_size
  share = pl.cdiv(num_chunks, num_splits)
  tile, split = pl.program_id(0), pl.program_id(1)

  start = split * share
  stop = jnp.minimum(start + share, num_chunks)

  rows_fn = functools.partial(triton_chunks.plain_rows, x, row, is_row)
  if epsilon is not None:
    is_written = is_row & (tile == 0)
    rows_fn = functools.partial(
      _scaled_rows, x, added, norm, summed, row, is_row, is_written
    )

  write = functools.partial(
    _write, out, scales, row, is_row, num_inputs, activation, epsilon
  )
  parts = []
  for i in range(num_joined):
    total, square_sums = triton_chunks.add_chunks(
      rows_fn,
      jnp.zeros((padded_rows,), jnp.float32),
      values,
      scales,
      start,
      stop,
      chunk_size,
      (i,),
    )
    if num_splits == 1:
      parts.append(total)
    else:
      totals[split, i] = total
  if num_splits == 1:
    write(parts, square_sums)
    return
  if epsilon is not None:
    squares[split] = square_sums

  @pl.when(last_program.is_last(num_done, num_splits, interpret=interpret))
  def _():
    write(
      [_sum_of(totals, i) for i in range(num_joined)],
      None if epsilon is None else _sum_of(squares),
    )


def _write(
  out, scales, row, is_row, num_inputs, activation, epsilon, parts, square_sums
):
  """Writes what the sums of parts f32[M, W] and of squares f32[M] make."""
  if scales.shape[1] == 1:
    parts = [part * scales[i] for i, part in enumerate(parts)]
  if epsilon is not None:
    factors = jax.lax.rsqrt(square_sums / num_inputs + epsilon)
    parts = [part * factors[:, None] for part in parts]
  total, *up = parts
  if activation:
    total = gate.gated_activation(total, *up, activation)
  places = row[:, None], jnp.arange(out.shape[1])[None]
  plgpu.store(out.at[places], total.astype(out.dtype), mask=is_row)


def _scaled_rows(
  x, added, norm, summed, row, is_row, is_written, inputs, square_sums
):
  """Adds rows, writes the sums, and scales them by inputs alone."""
  rows, _ = triton_chunks.plain_rows(x, row, is_row, inputs, None)
  others, _ = triton_chunks.plain_rows(added, row, is_row, inputs, None)
  rows += others
  plgpu.store(summed.at[row[:, None], inputs[None]], rows, mask=is_written)
  wide = rows.astype(jnp.float32)
  scaled = (wide * plgpu.load(norm.at[inputs])[None]).astype(rows.dtype)
  return scaled, square_sums + (wide * wide).sum(axis=1)


def _sum_of(sums, *part: int) -> jax.Array:
  """Returns f32[...], what the splits of f32[S, *part, ...] have together."""
  num_splits, *shape = sums.shape
  return jax.lax.fori_loop(
    0,
    num_splits,
    lambda split, total: total + sums[(split, *part)],
    jnp.zeros(shape[len(part) :], jnp.float32),
  )
