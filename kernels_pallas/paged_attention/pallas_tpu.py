"""Paged attention as a Pallas kernel for the TensorCore of a TPU.

As in `tree_attention`, one launch reads each visible row once, and copies of
the next block overlap with the products of this one. A block is several pages,
a copy each: where they lie is in the page table, which is prefetched. Pages
after the end of a row are neither looked up nor read.

Legend: X blocks of tokens, T tokens of a block, W mask words. P pages, Z rows
of a page, C pages of a table. G kv heads, Q query heads for each of them, E
head_dim, N rows of queries (Q x T with padding), K block_kv, H heads of a
program.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tiles
from kernels_pallas.paged_attention import padding
from kernels_pallas.tree_attention import pallas_tpu as tree_kernel
from kernels_pallas.tree_attention import tpu_blocks

Config = tree_kernel.Config

_ROW_STATES = 7  # arrays of a row of queries in VMEM
_MAX_TABLE_BYTES = 512 * 2**10  # of the scalars' memory


def check(queries: jax.Array, pages: jax.Array, num_columns: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  num_blocks, num_tokens, *_ = queries.shape
  page_size, width = pages.shape[1:]
  tpu_blocks.check(queries, num_tokens)
  if width % tiles.LANES:
    # XLA keeps such pages in another order, and would copy all of them.
    raise NotImplementedError(
      f'rows of {width} numbers are no multiple of {tiles.LANES}'
    )
  tile = 32 // queries.dtype.itemsize
  if page_size % tile or (page_size % tiles.LANES and tiles.LANES % page_size):
    raise NotImplementedError(
      f'pages of {page_size} rows are no multiple of {tile} that divides '
      f'{tiles.LANES} or is divided by it'
    )
  num_bytes = 4 * num_blocks * num_columns
  if num_bytes > _MAX_TABLE_BYTES:
    raise NotImplementedError(
      f'a page table of {num_bytes} bytes is larger than {_MAX_TABLE_BYTES}'
    )


def paged_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  page_table: jax.Array,
  prefix_lengths: jax.Array,
  num_tokens: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  config: Config | None = None,
  interpret: bool | pltpu.InterpretParams = False,
  with_sums: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """See `reference.paged_attention`; raises NotImplementedError as `check`."""
  check(queries, keys, page_table.shape[1])
  num_blocks, size, num_kv_heads, num_groups, head_dim = queries.shape
  config = config or Config()
  page_size, num_columns = keys.shape[1], page_table.shape[1]
  capacity = num_columns * page_size
  mask, positions = padding.hide(num_tokens, tree_mask, positions)
  grouped = tpu_blocks.group(queries)
  num_rows = grouped.shape[2]
  words, first_rows = tpu_blocks.pack_mask(
    mask, positions, prefix_lengths, window
  )
  block_kv = min(config.block_kv, pl.cdiv(capacity, tiles.LANES) * tiles.LANES)
  block_kv = pl.cdiv(block_kv, page_size) * page_size
  num_heads = _num_heads(
    config.num_heads, grouped, keys.dtype.itemsize, block_kv
  )
  sinks = tpu_blocks.group_sinks(sinks, num_rows, size)
  rows_spec = pl.BlockSpec(
    (None, num_heads, num_rows, head_dim), lambda b, g, *_: (b, g, 0, 0)
  )
  block = (2, block_kv, num_heads * head_dim)
  kernel = functools.partial(
    _kernel,
    num_columns=num_columns,
    block_kv=block_kv,
    scale=scale,
    has_window=window is not None,
  )
  if sinks:
    kernel = tpu_blocks.with_ref(kernel, 8, 'sinks')
  elif with_sums:  # after the result
    kernel = tpu_blocks.with_ref(kernel, 9, 'log_sums')
  sums_spec = pl.BlockSpec(
    (None, num_heads, num_rows, 1), lambda b, g, *_: (b, g, 0, 0)
  )
  sums_shape = jax.ShapeDtypeStruct((*grouped.shape[:3], 1), jnp.float32)
  found = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(num_blocks, num_kv_heads // num_heads),
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
      out_specs=[rows_spec, sums_spec][: 1 + with_sums],
      scratch_shapes=[
        pltpu.VMEM(block, keys.dtype),
        pltpu.VMEM(block, values.dtype),
        pltpu.SemaphoreType.DMA((2, 2)),
        *tpu_blocks.scratch(num_heads, num_rows, head_dim),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct(grouped.shape, queries.dtype),
      sums_shape,
    ][: 1 + with_sums],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel')
    ),
    interpret=interpret,
    name='paged_attention',
  )(
    jnp.maximum(page_table, 0).ravel(),
    prefix_lengths,
    first_rows,
    padding.ends_of(prefix_lengths, num_tokens, capacity),
    grouped,
    words,
    keys,
    values,
    *sinks,
  )
  attended, *log_sums = (
    padding.zero(tpu_blocks.ungroup(x, size, num_groups), num_tokens)
    for x in found
  )
  return (attended, log_sums[0][..., 0]) if with_sums else attended


def _num_heads(most, grouped, itemsize, block_kv) -> int:
  """Returns H: whole lanes of a page, of G heads side by side."""
  _, num_kv_heads, num_rows, head_dim = grouped.shape
  # Two queries and results, and the running softmax.
  lanes = _ROW_STATES * max(head_dim, tiles.LANES)
  fitting = tpu_blocks.num_heads_of(
    most, num_kv_heads, head_dim * itemsize, block_kv, 4 * num_rows * lanes
  )
  wide = [
    n
    for n in range(fitting, num_kv_heads)
    if num_kv_heads % n == 0 and n * head_dim % tiles.LANES == 0
  ]
  return min(wide, default=num_kv_heads)


def _kernel(
  # Prefetched scalars:
  page_table,  # i32[X * C]
  prefix_lengths,  # i32[X]
  first_rows,  # i32[X] first visible row of any token
  ends,  # i32[X] rows that any token may see
  # Inputs:
  queries,  # [H, N, E]
  words,  # i32[T, W] mask, with a window also the first visible row
  keys,  # [P, Z, G * E] in HBM
  values,  # as keys
  # Output:
  out,  # [H, N, E]
  # Scratch:
  key_blocks,  # [2, K, H * E]
  value_blocks,  # as key_blocks
  semaphores,  # [2, 2]
  *state,  # as `tpu_blocks.scratch`
  num_columns: int,
  block_kv: int,
  **options,
):
  row = pl.program_id(0)
  end, page_size, head_dim = ends[row], keys.shape[1], queries.shape[2]
  lanes = pl.ds(
    pl.multiple_of(pl.program_id(1) * key_blocks.shape[2], tiles.LANES),
    key_blocks.shape[2],
  )
  pages_of_block = block_kv // page_size

  def for_each_copy(block, act_fn):
    slot = jax.lax.rem(block, 2)
    first = block * pages_of_block
    after = jnp.minimum(
      first + pages_of_block, jax.lax.div(end + page_size - 1, page_size)
    )

    def act(column, _):
      page = page_table[row * num_columns + column]
      place = pl.multiple_of((column - first) * page_size, page_size)
      for i, (source, target) in enumerate(
        ((keys, key_blocks), (values, value_blocks))
      ):
        act_fn(
          pltpu.make_async_copy(
            source.at[page, :, lanes],
            target.at[slot, pl.ds(place, page_size)],
            semaphores.at[slot, i],
          )
        )

    jax.lax.fori_loop(first, after, act, None)

  def read(block, head, is_masked):
    place = (
      jax.lax.rem(block, 2),
      slice(None),
      pl.ds(head * head_dim, head_dim),
    )
    keys, values = key_blocks[place], value_blocks[place]
    if is_masked:
      # What is after the end has not been copied.
      rows = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
      is_row = rows + block * block_kv < end
      values = jnp.where(is_row, values, jnp.zeros_like(values))
    return keys, values

  tpu_blocks.attend(
    prefix_lengths[row],
    first_rows[row],
    end,
    queries,
    words,
    out,
    state,
    start_fn=lambda block: for_each_copy(block, lambda copy: copy.start()),
    wait_fn=lambda block: for_each_copy(block, lambda copy: copy.wait()),
    read_fn=read,
    block_kv=block_kv,
    rows_axis=0,
    **options,
  )
