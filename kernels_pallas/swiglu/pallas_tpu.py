"""Gate and up products as a Pallas kernel for the TensorCore of a TPU.

One launch reads each weight once, in blocks that are copied while the block
before is multiplied; both sums stay in VMEM until the activation.

Gate and up of one place lie side by side in memory, in bfloat16 as the halves
of one 32-bit word. They come in as they lie, and are parted in registers.

Legend: N tokens, D embed, F ffw, K rows and C columns of a block.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import products, tiles
from kernels_pallas.swiglu import reference

_CHUNK = 256  # rows that are unrolled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  # Most bytes of a block, of which two are in VMEM.
  block_bytes: int = tiles.number((2**20, 2**21, 2**22), 2 * 2**20)
  # Columns of gate, and of up; a multiple of 128.
  block_columns: int = tiles.number((256, 512, 1024), 512, multiple=tiles.LANES)


check = functools.partial(reference.check, most_tokens=256)


def swiglu(
  x: jax.Array,
  gate_up: jax.Array,
  *,
  activation: str,
  config: Config = Config(),
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """See `api.swiglu`, of x [N, D]; raises NotImplementedError as `check`."""
  check(x)
  num_tokens, embed_dim = x.shape
  ffw_dim = gate_up.shape[2]
  columns = min(config.block_columns, ffw_dim)
  most_rows = config.block_bytes // (2 * columns * gate_up.dtype.itemsize)
  rows = tiles.whole_lanes(embed_dim, most_rows)
  return pl.pallas_call(
    functools.partial(_kernel, activation=activation),
    grid=(pl.cdiv(ffw_dim, columns), embed_dim // rows),
    in_specs=[
      pl.BlockSpec((num_tokens, rows), lambda f, d: (0, d)),
      pl.BlockSpec((rows, 2, columns), lambda f, d: (d, 0, f)),
    ],
    out_specs=pl.BlockSpec((num_tokens, columns), lambda f, d: (0, f)),
    out_shape=jax.ShapeDtypeStruct((num_tokens, ffw_dim), x.dtype),
    scratch_shapes=[pltpu.VMEM((num_tokens, columns), jnp.float32)] * 2,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    interpret=interpret,
    name='swiglu',
  )(x, gate_up)


def _kernel(
  # Inputs:
  x,  # [N, K]
  gate_up,  # [K, 2, C]
  # Output:
  out,  # [N, C]
  # Scratch:
  gates,  # f32[N, C] sums so far
  ups,  # f32[N, C]
  *,
  activation: str,
):
  num_rows = x.shape[1]

  @pl.when(pl.program_id(1) == 0)
  def _():
    gates[...] = jnp.zeros_like(gates)
    ups[...] = jnp.zeros_like(ups)

  chunk = math.gcd(num_rows, _CHUNK)
  if chunk % tiles.LANES:
    chunk = num_rows

  @pl.loop(0, num_rows // chunk)
  def _(i):
    rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
    gate, up = _part(gate_up[rows])
    gates[...] += products.dot(x[:, rows], gate)
    ups[...] += products.dot(x[:, rows], up)

  @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
  def _():
    hidden = reference.gated_activation(gates[...], ups[...], activation)
    out[...] = hidden.astype(out.dtype)


def _part(gate_up):
  """Returns gate and up [K, C] of [K, 2, C]."""
  if gate_up.dtype == jnp.float32:
    return gate_up[:, 0], gate_up[:, 1]
  # Two rows of a 16-bit type share words: the even row is the lower half.
  words = pltpu.bitcast(gate_up.reshape(-1, gate_up.shape[2]), jnp.uint32)
  return tuple(
    jax.lax.bitcast_convert_type(half, jnp.float32).astype(gate_up.dtype)
    for half in (words << 16, words & jnp.uint32(0xFFFF0000))
  )
