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
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

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
# Pallas has signed offsets of 32 bits up to this size, and then of 64 bits.
_NARROW_BYTES = 2**32


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
  num_bytes = values.size * tiles.BITS[values.dtype.name] // 8
  if _NARROW_BYTES // 2 < num_bytes <= _NARROW_BYTES:
    raise NotImplementedError(
      f'offsets in {num_bytes} bytes of a weight do not fit into 31 bits'
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
  padded_rows = max(pl.next_power_of_2(num_rows), _LEAST_SIDE)

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
      chunk_size=chunk_size_of(num_inputs, num_groups),
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
  num_splits, num_joined, padded_rows, block = totals.shape
  row = jnp.arange(padded_rows)
  is_row = (row < num_rows)[:, None]
  num_chunks = num_inputs // chunk_size
  share = pl.cdiv(num_chunks, num_splits)
  tile, split = pl.program_id(0), pl.program_id(1)

  start = split * share
  stop = jnp.minimum(start + share, num_chunks)

  rows_fn = functools.partial(plain_rows, x, row, is_row)
  if epsilon is not None:
    is_written = is_row & (tile == 0)
    rows_fn = functools.partial(
      _scaled_rows, x, added, norm, summed, row, is_row, is_written
    )
  for i in range(num_joined):
    totals[split, i], square_sums = add_chunks(
      rows_fn,
      jnp.zeros((padded_rows,), jnp.float32),
      values,
      scales,
      start,
      stop,
      chunk_size,
      (i,),
    )
  if epsilon is not None:
    squares[split] = square_sums

  @pl.when(last_program.is_last(num_done, num_splits, interpret=interpret))
  def _():
    parts = [_sum_of(totals, i) for i in range(num_joined)]
    if scales.shape[1] == 1:
      parts = [part * scales[i] for i, part in enumerate(parts)]
    if epsilon is not None:
      factors = _factors_of(squares, num_inputs, epsilon)
      parts = [part * factors[:, None] for part in parts]
    total, *up = parts
    if activation:
      total = gate.gated_activation(total, *up, activation)
    plgpu.store(
      out.at[row[:, None], jnp.arange(block)[None]],
      total.astype(out.dtype),
      mask=is_row,
    )


def plain_rows(x, row, is_row, inputs, carry):
  """Returns rows [M, J] of x [T, K], for `add_chunks`."""
  places = row[:, None], inputs[None]
  return plgpu.load(x.at[places], mask=is_row, other=0), carry


def _scaled_rows(
  x, added, norm, summed, row, is_row, is_written, inputs, square_sums
):
  """Adds rows, writes the sums, and scales them by inputs alone."""
  rows, _ = plain_rows(x, row, is_row, inputs, None)
  others, _ = plain_rows(added, row, is_row, inputs, None)
  rows += others
  plgpu.store(summed.at[row[:, None], inputs[None]], rows, mask=is_written)
  wide = rows.astype(jnp.float32)
  scaled = (wide * plgpu.load(norm.at[inputs])[None]).astype(rows.dtype)
  return scaled, square_sums + (wide * wide).sum(axis=1)


def _factors_of(squares, num_inputs, epsilon) -> jax.Array:
  """Returns f32[M], what the norm multiplies the products of a row with."""
  return jax.lax.rsqrt(_sum_of(squares) / num_inputs + epsilon)


def _sum_of(sums, *part: int) -> jax.Array:
  """Returns f32[...], what the splits of f32[S, *part, ...] have together."""
  num_splits, *shape = sums.shape
  return jax.lax.fori_loop(
    0,
    num_splits,
    lambda split, total: total + sums[(split, *part)],
    jnp.zeros(shape[len(part) :], jnp.float32),
  )


def add_chunks(
  rows_fn: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
  carry: jax.Array,
  values,
  scales,
  start,
  stop,
  chunk_size,
  part=(),
) -> tuple[jax.Array, Any]:
  """Returns the product of some chunks of inputs f32[M, W], and a carry.

  A scale for all inputs is left to the caller.

  Args:
    rows_fn: function of the inputs i32[J] of a chunk and the carry, that
      returns rows [M, J] and the next carry.
    carry: argument of the first call, an array f32[M].
    values: reference to the numbers [*part, K, W].
    scales: reference to f32[*part, C, W], or to uint8 for MXFP4, see `float4`.
    start: number of the first chunk.
    stop: number of the chunk behind the last.
    chunk_size: J.
    part: scalars i32[], the place of the matrix among several.
  """
  num_groups, block = scales.shape[-2:]

  def add_chunk(chunk, carry):
    total, carry = carry
    first = chunk * chunk_size
    inputs = first + jnp.arange(chunk_size)
    weights = values[(*part, pl.ds(first, chunk_size))]
    if float4.is_used(scales):
      weights = float4.numbers(weights)
    rows, carry = rows_fn(inputs, carry)
    product = plgpu.dot(
      rows, weights.astype(rows.dtype), precision=tiles.precision(rows.dtype)
    )
    if num_groups > 1:
      product *= float4.wide(scales[(*part, chunk)])[None]
    return total + product, carry

  nothing = jnp.zeros((len(carry), block), jnp.float32)
  return jax.lax.fori_loop(start, stop, add_chunk, (nothing, carry))


def chunk_size_of(num_inputs: int, num_groups: int) -> int:
  """Returns J: a group, or where there is one only a divisor of it."""
  if num_groups > 1:
    return num_inputs // num_groups
  return math.gcd(num_inputs, _MOST_SIDE)
