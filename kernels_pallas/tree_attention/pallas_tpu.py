"""Tree attention as a Pallas kernel for the TensorCore of a TPU.

One launch reads each visible cache row once, over double-buffered copies from
HBM; the loop ends with the last row in use, whatever the capacity. Queries of
one kv head lie side by side, so that a block of keys is multiplied once. A
TensorCore runs one program at a time: instead of splitting the keys, the
copies of the next block overlap with the products of this one.

XLA keeps a cache whose head_dim does not fill the lanes with its rows on the
lanes. The kernel then reads it in that order, because another one would cost a
copy of the whole cache.

Legend:
- B rows, T query tokens, M cache rows of the tree, S cache capacity
- G kv heads, Q query heads for each kv head, E head_dim, W mask words
- N rows of queries (Q x T with padding), K block_kv, H heads of a program
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tiles
from kernels_pallas.tree_attention import tpu_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  # Cache rows of a copy.
  block_kv: int = tiles.number((128, 256, 512, 1024), 512, multiple=tiles.LANES)
  # Most kv heads of a program; fewer where their blocks would not fit into
  # VMEM.
  num_heads: int = tiles.number((1, 2, 4, 8), 8)


def check(queries: jax.Array, keys: jax.Array, tree_size: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  tpu_blocks.check(queries, tree_size)
  tiles.check_multiple(keys.shape[2], tiles.LANES, 'cache rows')


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  config: Config = Config(),
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """See `reference.tree_attention`; raises NotImplementedError as `check`."""
  check(queries, keys, tree_mask.shape[2])
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  capacity = keys.shape[2]
  grouped = tpu_blocks.group(queries)
  num_rows = grouped.shape[2]
  words, first_rows = tpu_blocks.pack_mask(
    tree_mask, positions, prefix_lengths, window
  )
  ends = jnp.minimum(prefix_lengths + tree_mask.shape[2], capacity)
  block_kv = tiles.whole_lanes(capacity, config.block_kv)
  num_heads = tpu_blocks.num_heads_of(
    config.num_heads, num_kv_heads, head_dim * keys.dtype.itemsize, block_kv
  )
  rows_on_lanes = head_dim % tiles.LANES != 0
  block_shape = (block_kv, head_dim)
  if rows_on_lanes:
    keys, values = jnp.swapaxes(keys, 2, 3), jnp.swapaxes(values, 2, 3)
    block_shape = (head_dim, block_kv)
  kernel = functools.partial(
    _kernel,
    block_kv=block_kv,
    rows_on_lanes=rows_on_lanes,
    scale=scale,
    has_window=window is not None,
  )
  sinks = tpu_blocks.group_sinks(sinks, num_rows, num_tokens)
  rows_spec = pl.BlockSpec(
    (None, num_heads, num_rows, head_dim), lambda b, g, *_: (b, g, 0, 0)
  )
  out = pl.pallas_call(
    tpu_blocks.with_ref(kernel, 7, 'sinks') if sinks else kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(batch, num_kv_heads // num_heads),
      in_specs=[
        rows_spec,
        pl.BlockSpec((None, *words.shape[1:]), lambda b, g, *_: (b, 0, 0)),
        pl.BlockSpec(memory_space=pltpu.HBM),
        pl.BlockSpec(memory_space=pltpu.HBM),
        *(
          pl.BlockSpec((num_heads, num_rows, 1), lambda b, g, *_: (g, 0, 0))
          for _ in sinks
        ),
      ],
      out_specs=rows_spec,
      scratch_shapes=[
        pltpu.VMEM((2, num_heads, *block_shape), keys.dtype),
        pltpu.VMEM((2, num_heads, *block_shape), values.dtype),
        pltpu.SemaphoreType.DMA((2, 2)),
        *tpu_blocks.scratch(num_heads, num_rows, head_dim),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(grouped.shape, queries.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel')
    ),
    interpret=interpret,
    name='tree_attention',
  )(prefix_lengths, first_rows, ends, grouped, words, keys, values, *sinks)
  return tpu_blocks.ungroup(out, num_tokens, num_groups)


def _kernel(
  # Prefetched scalars:
  prefix_lengths,  # i32[B]
  first_rows,  # i32[B] first visible row of any token
  ends,  # i32[B] rows that any token may see
  # Inputs:
  queries,  # [H, N, E]
  words,  # i32[T, W] mask, with a window also the first visible row
  keys,  # [B, G, S, E] in HBM, with rows on the lanes [B, G, E, S]
  values,  # as keys
  # Output:
  out,  # [H, N, E]
  # Scratch:
  key_blocks,  # [2, H, K, E] or [2, H, E, K]
  value_blocks,  # as key_blocks
  semaphores,  # [2, 2]
  *state,  # as `tpu_blocks.scratch`
  block_kv: int,
  rows_on_lanes: bool,
  **options,
):
  row, num_heads = pl.program_id(0), queries.shape[0]
  copies = functools.partial(
    _copies,
    pairs=((keys, key_blocks), (values, value_blocks)),
    semaphores=semaphores,
    place=(row, pl.ds(pl.program_id(1) * num_heads, num_heads)),
    block_kv=block_kv,
    rows_on_lanes=rows_on_lanes,
  )

  def start(block):
    for copy in copies(block):
      copy.start()

  def wait(block):
    for copy in copies(block):
      copy.wait()

  def read(block, head, is_masked):
    del is_masked  # all rows of a cache are finite
    slot = jax.lax.rem(block, 2)
    return key_blocks[slot, head], value_blocks[slot, head]

  tpu_blocks.attend(
    prefix_lengths[row],
    first_rows[row],
    ends[row],
    queries,
    words,
    out,
    state,
    start_fn=start,
    wait_fn=wait,
    read_fn=read,
    block_kv=block_kv,
    rows_axis=int(rows_on_lanes),
    **options,
  )


def _copies(block, *, pairs, semaphores, place, block_kv, rows_on_lanes):
  """Returns the copies of a block of keys and of values to their slot."""
  slot = jax.lax.rem(block, 2)
  rows = pl.ds(pl.multiple_of(block * block_kv, block_kv), block_kv)
  place = (*place, slice(None), rows) if rows_on_lanes else (*place, rows)
  return [
    pltpu.make_async_copy(
      source.at[place], target.at[slot], semaphores.at[slot, i]
    )
    for i, (source, target) in enumerate(pairs)
  ]
