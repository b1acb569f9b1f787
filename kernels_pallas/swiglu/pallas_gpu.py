"""Gate and up products as a Pallas Triton kernel for NVIDIA GPUs.

One launch. Where the columns alone make too few programs to occupy the device,
the rows are split as well, and the program that ends last adds the sums.

Legend: N tokens, R tokens with padding, D embed, F ffw, K rows and C columns of
a block, P splits.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program, products, tiles
from kernels_pallas.swiglu import reference

_MOST_TOKENS = 128
_NUM_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  # K, which divides D.
  block_rows: int = tiles.power((32, 64, 128), 64, multiple=16)
  block_columns: int = tiles.power((32, 64, 128), 64, multiple=16)  # C
  # Programs that share the rows of a column.
  num_splits: int = tiles.number((1, 2, 4), 1)
  num_warps: int = tiles.power((4, 8), 4)  # warps of a program
  num_stages: int = tiles.number((2, 3, 4), 4)  # blocks in flight


def _default_config(num_rows, gate_up):
  """Returns tiles that occupy the device; not measured.

  Products of float32 are made without matrix units.
  """
  embed_dim, _, ffw_dim = gate_up.shape
  is_float32 = gate_up.dtype == jnp.float32
  is_tall = num_rows > 32
  block_rows = math.gcd(embed_dim, 32 if is_float32 else 64)
  block_columns = 32 if is_float32 else 64
  num_tiles = pl.cdiv(ffw_dim, block_columns)
  # Each split has two blocks at least.
  most_splits = max(embed_dim // block_rows // 2, 1)
  num_splits = min(pl.cdiv(_NUM_PROGRAMS, num_tiles), most_splits)
  return Config(
    block_rows=block_rows,
    block_columns=block_columns,
    num_splits=num_splits,
    num_warps=8 if is_tall else 4,
    num_stages=2 if is_float32 else 4,
  )


def check(x: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  reference.check(x, most_tokens=_MOST_TOKENS)
  tiles.check_multiple(x.shape[1], tiles.LEAST_SIDE, 'rows of the weights')


def swiglu(
  x: jax.Array,
  gate_up: jax.Array,
  *,
  activation: str,
  config: Config | None = None,
  interpret: bool = False,
) -> jax.Array:
  """See `api.swiglu`, of x [N, D]; raises NotImplementedError as `check`."""
  check(x)
  num_tokens, embed_dim = x.shape
  ffw_dim = gate_up.shape[2]
  num_rows = max(pl.next_power_of_2(num_tokens), tiles.LEAST_SIDE)
  config = config or _default_config(num_rows, gate_up)
  if embed_dim % config.block_rows:
    raise ValueError(
      f'{config.block_rows} rows of a block do not divide {embed_dim}'
    )
  num_tiles = pl.cdiv(ffw_dim, config.block_columns)
  sums = (num_tiles, config.num_splits, 2, num_rows, config.block_columns)

  def whole(*shape):
    return pl.BlockSpec(shape, lambda f, p: (0,) * len(shape))

  def of_tile(*shape):
    return pl.BlockSpec((None, *shape), lambda f, p: (f, *(0 for _ in shape)))

  counters, counter = last_program.counters(num_tiles, lambda f, _: f)
  out, _ = pl.pallas_call(
    functools.partial(
      _kernel,
      activation=activation,
      num_rows=num_rows,
      config=config,
      interpret=interpret,
    ),
    grid=(num_tiles, config.num_splits),
    in_specs=[whole(*x.shape), whole(*gate_up.shape), counter],
    out_specs=[whole(num_tokens, ffw_dim), of_tile(*sums[1:])],
    out_shape=[
      jax.ShapeDtypeStruct((num_tokens, ffw_dim), x.dtype),
      jax.ShapeDtypeStruct(sums, jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name='swiglu',
  )(x, gate_up, counters)
  return out


def _kernel(
  # Inputs:
  x,  # [N, D]
  gate_up,  # [D, 2, F]
  num_done,  # i32[1]
  # Outputs:
  out,  # [N, F]
  sums,  # f32[P, 2, R, C] of each split
  *,
  activation: str,
  num_rows: int,
  config: Config,
  interpret: bool,
):
  tile, split = pl.program_id(0), pl.program_id(1)
  token = jnp.arange(num_rows)
  column = tile * config.block_columns + jnp.arange(config.block_columns)
  is_token, is_column = token < x.shape[0], column < out.shape[1]
  precision = products.precision(x.dtype)

  def add_block(block, carry):
    row = block * config.block_rows + jnp.arange(config.block_rows)
    inputs = plgpu.load(
      x.at[token[:, None], row[None]], mask=is_token[:, None], other=0
    )
    weights = [
      plgpu.load(
        gate_up.at[row[:, None], kind, column[None]],
        mask=is_column[None],
        other=0,
      )
      for kind in range(2)
    ]
    return tuple(
      total + plgpu.dot(inputs, weight, precision=precision)
      for total, weight in zip(carry, weights, strict=True)
    )

  num_blocks = x.shape[1] // config.block_rows
  share = pl.cdiv(num_blocks, config.num_splits)
  start = jnp.minimum(split * share, num_blocks)
  zeros = jnp.zeros((num_rows, config.block_columns), jnp.float32)
  totals = jax.lax.fori_loop(
    start, jnp.minimum(start + share, num_blocks), add_block, (zeros, zeros)
  )

  def write(gate, up):
    hidden = reference.gated_activation(gate, up, activation)
    plgpu.store(
      out.at[token[:, None], column[None]],
      hidden.astype(out.dtype),
      mask=is_token[:, None] & is_column[None],
    )

  if config.num_splits == 1:
    write(*totals)
    return
  for kind, total in enumerate(totals):
    sums[split, kind] = total

  @pl.when(
    last_program.is_last(num_done, config.num_splits, interpret=interpret)
  )
  def _():
    # In the order of the splits, whoever ends last.
    write(
      *jax.lax.fori_loop(
        0,
        config.num_splits,
        lambda i, carry: (carry[0] + sums[i, 0], carry[1] + sums[i, 1]),
        (zeros, zeros),
      )
    )
