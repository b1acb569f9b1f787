"""Product with quantized weights of experts as a Pallas kernel for TPUs.

A program multiplies a piece of rows, which are of one expert and lie in one
block, with a tile of its expert's outputs. The pieces of an expert follow each
other, so the pipeline copies its tile once, and those of a block of rows do,
too, so their results meet in VMEM. Experts without rows are not read. A tile is
widened and multiplied as in `quantized_matmul`.

Legend: R rows, B rows of a block, X experts, K inputs, N outputs, C groups of
inputs, H chunks, J inputs of a chunk, W block_outputs, M pieces.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tiles as block_tiles
from kernels_pallas.grouped_matmul import tiles
from kernels_pallas.quantized_matmul import pallas_tpu as dense
from kernels_pallas.quantized_matmul import tiles as dense_tiles

_ROW_TILE = 16  # of a register of bfloat16
_MOST_BLOCK_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(block_tiles.Config):
  """Tiles of the kernel."""

  # Rows of a block.
  block_rows: int = block_tiles.number((16, 32, 64, 128), multiple=_ROW_TILE)
  # Outputs of a program.
  block_outputs: int = block_tiles.number(
    (128, 256, 512, 1024), multiple=block_tiles.LANES
  )


def check(x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  dense_tiles.check(x, values, tiles.MOST_ROWS)
  if tiles.is_reordered(values.shape):
    raise NotImplementedError(
      f'XLA keeps the weights {list(values.shape)} in another order'
    )
  num_rows = min(dense.padded_rows(x.shape[0]), _MOST_BLOCK_ROWS)
  dense.check_tile(num_rows, x.dtype, values, scales)


def grouped_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  chosen: jax.Array,
  *,
  config: Config | None = None,
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """See `api.grouped_matmul`; raises NotImplementedError as `check`."""
  check(x, values, scales)
  num_rows = len(x)
  num_experts, num_inputs, num_outputs = values.shape
  num_groups = scales.shape[1]
  config = config or _default_config(num_rows, values)
  block_rows, block_outputs = config.block_rows, config.block_outputs
  padded_rows = pl.cdiv(num_rows, block_rows) * block_rows
  chunks = dense.chunks_of(x, padded_rows, dense.chunk_size_of(values, scales))
  firsts, experts = tiles.pieces(chosen, num_experts, block_rows)

  def block_of(piece, firsts):
    # `//` would ask for the device, which need not be here.
    return jax.lax.div(jnp.minimum(firsts[piece], num_rows - 1), block_rows)

  def tile_of(num_sublanes):
    return pl.BlockSpec(
      (None, num_sublanes, block_outputs),
      lambda n, piece, firsts, experts: (experts[piece], 0, n),
    )

  out = pl.pallas_call(
    _kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(pl.cdiv(num_outputs, block_outputs), len(experts)),
      in_specs=[
        pl.BlockSpec(
          (len(chunks), block_rows, chunks.shape[2]),
          lambda n, piece, firsts, experts: (0, block_of(piece, firsts), 0),
        ),
        tile_of(num_inputs),
        tile_of(num_groups),
      ],
      out_specs=pl.BlockSpec(
        (block_rows, block_outputs),
        lambda n, piece, firsts, experts: (block_of(piece, firsts), n),
      ),
    ),
    out_shape=jax.ShapeDtypeStruct((padded_rows, num_outputs), x.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    interpret=interpret,
    name='grouped_matmul',
  )(firsts, experts, chunks, values, scales)
  return out[:num_rows]


def _default_config(num_rows, values):
  """Returns tiles with about 1 MiB of weights; not measured."""
  return Config(
    block_rows=min(dense.padded_rows(num_rows), _MOST_BLOCK_ROWS),
    block_outputs=dense.default_config(values).block_outputs,
  )


def _kernel(
  # Prefetched:
  firsts,  # i32[M + 1]
  _,  # i32[M] experts
  # Inputs:
  chunks,  # [H, B, J]
  values,  # int8, int4 or float8_e4m3fn [K, W]
  scales,  # f32[C, W], or uint8
  # Output:
  out,  # [B, W]
):
  piece = pl.program_id(1)
  first, stop = firsts[piece], firsts[piece + 1]

  @pl.when(first < stop)
  def _():
    product = dense.multiply_tile(chunks, values, scales)
    place = jax.lax.rem(first, out.shape[0])
    row = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    is_own = (row >= place) & (row < place + stop - first)
    others = out[...].astype(jnp.float32)
    out[...] = jnp.where(is_own, product, others).astype(out.dtype)
