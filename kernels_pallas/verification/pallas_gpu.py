"""Verification of a tree as a Pallas Triton kernel for NVIDIA GPUs.

One launch: programs share the vocabulary, and the one that ends last compares
their best tokens and walks over the tree.

Legend: B rows, T nodes of the tree, N nodes with padding, V vocabulary, K
block_vocab, P programs of a row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program, tiles
from kernels_pallas.verification import walk

_MAX_NODES = 64
_MIN_NODES = 2

check = functools.partial(walk.check, most_nodes=_MAX_NODES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  block_vocab: int = tiles.power((512, 1024, 2048), 1024)  # tokens of a tile
  num_programs: int = tiles.power((32, 64, 128), 128)  # most programs of a row
  num_warps: int = tiles.power((4, 8), 4)  # warps of a program


def verify_tree(
  scores: jax.Array,
  token_ids: jax.Array,
  parents: jax.Array,
  sizes: jax.Array,
  ancestor_mask: jax.Array,
  *,
  config: Config = Config(),
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """See `api.verify_tree`; raises NotImplementedError as `check`."""
  check(scores)
  batch, num_nodes, vocab_size = scores.shape
  num_rows = max(pl.next_power_of_2(num_nodes), _MIN_NODES)
  num_tiles = pl.cdiv(vocab_size, config.block_vocab)
  num_programs = min(config.num_programs, pl.next_power_of_2(num_tiles))

  def of_row(*shape):
    return pl.BlockSpec((None, *shape), lambda b, p: (b, *(0 for _ in shape)))

  out_shapes = [
    ((num_nodes,), jnp.int32),
    ((1,), jnp.int32),
    ((num_nodes,), jnp.int32),
    ((num_nodes,), jnp.int32),
    ((num_programs, num_rows), jnp.float32),
    ((num_programs, num_rows), jnp.int32),
  ]
  counters, counter = last_program.counters(batch, lambda b, _: b)
  tokens, num_accepted, path, choices, *_ = pl.pallas_call(
    functools.partial(
      _kernel,
      num_tiles=num_tiles,
      block_vocab=config.block_vocab,
      interpret=interpret,
    ),
    grid=(batch, num_programs),
    in_specs=[
      of_row(),
      of_row(num_nodes, vocab_size),
      of_row(num_nodes),
      of_row(num_nodes),
      of_row(num_nodes, num_nodes),
      counter,
    ],
    out_specs=[of_row(*shape) for shape, _ in out_shapes],
    out_shape=[
      jax.ShapeDtypeStruct((batch, *shape), dtype)
      for shape, dtype in out_shapes
    ],
    compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
    interpret=interpret,
    name='verify_tree',
  )(
    sizes,
    scores,
    token_ids,
    parents,
    ancestor_mask.astype(jnp.int32),
    counters,
  )
  return tokens, num_accepted[:, 0], path, choices


def _kernel(
  # Inputs:
  size,  # i32[]
  scores,  # f32[T, V]
  token_ids,  # i32[T]
  parents,  # i32[T]
  ancestor_mask,  # i32[T, T]
  num_done,  # i32[1]
  # Outputs:
  tokens,  # i32[T]
  num_accepted,  # i32[1]
  path,  # i32[T]
  choices,  # i32[T]
  best,  # f32[P, N] highest score of each program
  first,  # i32[P, N] its token
  *,
  num_tiles: int,
  block_vocab: int,
  interpret: bool,
):
  num_nodes, vocab_size = scores.shape
  num_programs, num_rows = best.shape
  program = pl.program_id(1)
  node = jnp.arange(num_rows)
  is_node = node < num_nodes
  share = pl.cdiv(num_tiles, num_programs)
  start = program * share

  def add_tile(tile, carry):
    token = tile * block_vocab + jnp.arange(block_vocab)
    values = plgpu.load(
      scores.at[node[:, None], token[None]],
      mask=is_node[:, None] & (token < vocab_size)[None],
      other=-jnp.inf,
    )
    highest = values.max(axis=1)
    is_highest = values == highest[:, None]
    lowest = jnp.where(is_highest, token[None], walk.FAR).min(axis=1)
    # Of equal scores the first one counts, as in jnp.argmax.
    is_better = highest > carry[0]
    return (
      jnp.where(is_better, highest, carry[0]),
      jnp.where(is_better, lowest, carry[1]),
    )

  carry = (
    jnp.full((num_rows,), -jnp.inf, jnp.float32),
    jnp.zeros((num_rows,), jnp.int32),
  )
  stop = jnp.minimum(start + share, num_tiles)
  best[program], first[program] = jax.lax.fori_loop(
    start, stop, add_tile, carry
  )

  @pl.when(last_program.is_last(num_done, num_programs, interpret=interpret))
  def _():
    all_best = best[...]
    is_highest = all_best == all_best.max(axis=0)[None]
    # Where nothing is allowed, all programs agree on token 0.
    chosen = jnp.where(is_highest, first[...], walk.FAR).min(axis=0)
    load = functools.partial(plgpu.load, mask=is_node, other=-1)
    places = (node[:, None], node[None])
    found = walk.walk(
      chosen[:, None],
      load(token_ids.at[node])[None],
      load(parents.at[node])[None],
      plgpu.load(
        ancestor_mask.at[places],
        mask=is_node[:, None] & is_node[None],
        other=0,
      ),
      size[()],
      num_nodes,
    )
    for ref, value in ((tokens, found[0]), (path, found[2])):
      plgpu.store(ref.at[node], value.sum(axis=0), mask=is_node)
    plgpu.store(choices.at[node], chosen, mask=is_node)
    num_accepted[0] = found[1].sum()
