"""Verification of a tree as a Pallas kernel for the TensorCore of a TPU.

One launch: the scores are read once in tiles of the vocabulary, and after the
last tile of a row comes the walk.

Legend: B rows, T nodes of the tree, V vocabulary, K block_vocab.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tiles
from kernels_pallas.verification import walk

_MAX_NODES = 128

check = functools.partial(walk.check, most_nodes=_MAX_NODES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  # Tokens of a tile.
  block_vocab: int = tiles.number(
    (4096, 8192, 16_384), 8192, multiple=tiles.LANES
  )


def verify_tree(
  scores: jax.Array,
  token_ids: jax.Array,
  parents: jax.Array,
  sizes: jax.Array,
  ancestor_mask: jax.Array,
  *,
  config: Config = Config(),
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """See `api.verify_tree`; raises NotImplementedError as `check`."""
  check(scores)
  batch, num_nodes, vocab_size = scores.shape
  block = config.block_vocab

  def of_row(*shape):
    return pl.BlockSpec((None, *shape), lambda b, v, *_: (b, 0, 0))

  row = of_row(1, num_nodes)
  row_shape = jax.ShapeDtypeStruct((batch, 1, num_nodes), jnp.int32)
  tokens, num_accepted, path, choices = pl.pallas_call(
    functools.partial(_kernel, vocab_size=vocab_size),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, pl.cdiv(vocab_size, block)),
      in_specs=[
        pl.BlockSpec((None, num_nodes, block), lambda b, v, *_: (b, 0, v)),
        row,
        row,
        of_row(num_nodes, num_nodes),
      ],
      out_specs=[row, of_row(1, 1), row, of_row(num_nodes, 1)],
      scratch_shapes=[
        pltpu.VMEM((num_nodes, 1), jnp.float32),
      ],
    ),
    out_shape=[
      row_shape,
      jax.ShapeDtypeStruct((batch, 1, 1), jnp.int32),
      row_shape,
      jax.ShapeDtypeStruct((batch, num_nodes, 1), jnp.int32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    interpret=interpret,
    name='verify_tree',
  )(
    sizes,
    scores,
    token_ids[:, None],
    parents[:, None],
    ancestor_mask.astype(jnp.int32),
  )
  return tokens[:, 0], num_accepted[:, 0, 0], path[:, 0], choices[:, :, 0]


def _kernel(
  # Prefetched scalars:
  sizes,  # i32[B]
  # Inputs:
  scores,  # f32[T, K]
  token_ids,  # i32[1, T]
  parents,  # i32[1, T]
  ancestor_mask,  # i32[T, T]
  # Outputs:
  tokens,  # i32[1, T]
  num_accepted,  # i32[1, 1]
  path,  # i32[1, T]
  choices,  # i32[T, 1] tokens of the highest scores so far
  # Scratch:
  best,  # f32[T, 1] highest score so far
  *,
  vocab_size: int,
):
  row, tile = pl.program_id(0), pl.program_id(1)

  @pl.when(tile == 0)
  def _():
    best[...] = jnp.full_like(best, -jnp.inf)
    choices[...] = jnp.zeros_like(choices)

  token = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
  token += tile * scores.shape[1]
  inside = jnp.where(token < vocab_size, scores[...], -jnp.inf)
  highest = inside.max(axis=1, keepdims=True)
  first = jnp.where(inside == highest, token, walk.FAR).min(
    axis=1, keepdims=True
  )
  # Of equal scores the first one counts, as in jnp.argmax.
  choices[...] = jnp.where(highest > best[...], first, choices[...])
  best[...] = jnp.maximum(highest, best[...])

  @pl.when(tile == pl.num_programs(1) - 1)
  def _():
    tokens[...], num_accepted[...], path[...] = walk.walk(
      choices[...],
      token_ids[...],
      parents[...],
      ancestor_mask[...],
      sizes[row],
      scores.shape[0],
    )
