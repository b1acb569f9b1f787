"""Tree attention as a Pallas kernel for the TensorCore of a TPU.

One launch reads each visible cache row once, over double-buffered copies from
HBM; the loop ends with the last row in use, whatever the capacity. Queries of
one kv head lie side by side, so that a block of keys is multiplied once. A
TensorCore runs one program at a time: instead of splitting the keys, the
copies of the next block overlap with the products of this one.

XLA keeps a cache whose head_dim does not fill the lanes with its rows on the
lanes. The kernel then reads it in that order, because another one would cost a
copy of the whole cache.

Legend: B rows, T query tokens, M cache rows of the tree, S cache capacity, G
kv heads, Q query heads for each kv head, E head_dim, W mask words, N rows of
queries (Q x T with padding), K block_kv, H heads of a program.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tiles
from kernels_pallas.tree_attention import mask_words, reference

_SUBLANES = 8
_LANES = 128
_MAX_QUERY_ROWS = 256
_BUFFER_BYTES = 8 * 2**20  # of the blocks in VMEM, of which 16 MiB are free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Tiles of the kernel.

  Attributes:
    block_kv: cache rows of a copy, a multiple of 128.
    num_heads: most kv heads of a program; fewer where their blocks would not
      fit into VMEM.
    CANDIDATES: values that `tune_kernels` tries.
  """

  CANDIDATES: ClassVar[dict[str, tuple[int, ...]]] = {
    'block_kv': (128, 256, 512, 1024),
    'num_heads': (1, 2, 4, 8),
  }
  block_kv: int = 512
  num_heads: int = 8

  def __post_init__(self):
    tiles.check_multiples(self, tiles.LANES, 'block_kv')
    tiles.check_multiples(self, 1, 'num_heads')


def check(
  queries_shape: tuple[int, ...],
  keys_shape: tuple[int, ...],
  tree_size: int,
  dtype: jax.typing.DTypeLike,
) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  _, num_tokens, _, num_groups, head_dim = queries_shape
  capacity = keys_shape[2]
  mask_words.check(dtype, num_tokens * num_groups, _MAX_QUERY_ROWS, tree_size)
  if capacity % _LANES:
    raise NotImplementedError(
      f'{capacity} cache rows are no multiple of {_LANES}'
    )
  if head_dim not in (64, 128, 256):
    raise NotImplementedError(f'head_dim {head_dim} is not 64, 128 or 256')


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  window: int | None = None,
  soft_cap: float | None = None,
  config: Config = Config(),
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """See `reference.tree_attention`; raises NotImplementedError as `check`."""
  check(queries.shape, keys.shape, tree_mask.shape[2], queries.dtype)
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  capacity = keys.shape[2]
  # One token: the padding is of heads, and the mask the same for all of them.
  token_rows = 1 if num_tokens == 1 else _round_up(num_tokens, _SUBLANES)
  num_rows = _round_up(num_groups * token_rows, _SUBLANES)
  grouped = jnp.moveaxis(queries, 1, 3)
  grouped = jnp.pad(
    grouped,
    (
      *((0, 0),) * 2,
      (0, num_rows // token_rows - num_groups),
      (0, token_rows - num_tokens),
      (0, 0),
    ),
  ).reshape(batch, num_kv_heads, num_rows, head_dim)

  def token_column(x):
    return jnp.pad(x, ((0, 0), (0, token_rows - num_tokens), (0, 0)))

  words = mask_words.pack(tree_mask)
  if window is None:
    first_rows = jnp.zeros_like(prefix_lengths)
  else:
    lows = jnp.maximum(positions - window + 1, 0)
    first_rows = lows.min(axis=1)
    words = jnp.concatenate([words, lows[:, :, None]], axis=2)
  words = token_column(words)
  ends = jnp.minimum(prefix_lengths + tree_mask.shape[2], capacity)
  block_kv = _LANES * _divisor(capacity // _LANES, config.block_kv // _LANES)
  # Two blocks of keys and two of values.
  bytes_per_head = 4 * block_kv * head_dim * keys.dtype.itemsize
  most_heads = max(_BUFFER_BYTES // bytes_per_head, 1)
  num_heads = _divisor(num_kv_heads, min(config.num_heads, most_heads))
  rows_on_lanes = head_dim % _LANES != 0
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
    soft_cap=soft_cap,
  )
  rows_spec = pl.BlockSpec(
    (None, num_heads, num_rows, head_dim), lambda b, g, *_: (b, g, 0, 0)
  )
  out = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(batch, num_kv_heads // num_heads),
      in_specs=[
        rows_spec,
        pl.BlockSpec((None, *words.shape[1:]), lambda b, g, *_: (b, 0, 0)),
        pl.BlockSpec(memory_space=pltpu.HBM),
        pl.BlockSpec(memory_space=pltpu.HBM),
      ],
      out_specs=rows_spec,
      scratch_shapes=[
        pltpu.VMEM((2, num_heads, *block_shape), keys.dtype),
        pltpu.VMEM((2, num_heads, *block_shape), values.dtype),
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.VMEM((num_heads, num_rows, _LANES), jnp.float32),
        pltpu.VMEM((num_heads, num_rows, _LANES), jnp.float32),
        pltpu.VMEM((num_heads, num_rows, head_dim), jnp.float32),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(grouped.shape, queries.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel')
    ),
    interpret=interpret,
    name='tree_attention',
  )(prefix_lengths, first_rows, ends, grouped, words, keys, values)
  out = out.reshape(
    batch, num_kv_heads, num_rows // token_rows, token_rows, head_dim
  )
  return jnp.moveaxis(out[:, :, :num_groups, :num_tokens], 3, 1)


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
  maxima,  # f32[H, N, 128]
  sums,  # f32[H, N, 128]
  totals,  # f32[H, N, E]
  *,
  block_kv: int,
  rows_on_lanes: bool,
  scale: float,
  has_window: bool,
  soft_cap: float | None,
):
  row, num_heads = pl.program_id(0), queries.shape[0]
  prefix_length = prefix_lengths[row]
  first_block = jax.lax.div(first_rows[row], block_kv)
  end_block = jax.lax.div(ends[row] + block_kv - 1, block_kv)
  copies = functools.partial(
    _copies,
    pairs=((keys, key_blocks), (values, value_blocks)),
    semaphores=semaphores,
    place=(row, pl.ds(pl.program_id(1) * num_heads, num_heads)),
    block_kv=block_kv,
    rows_on_lanes=rows_on_lanes,
  )

  def add_block(block, visible):
    @pl.when(block + 1 < end_block)
    def _():
      for copy in copies(block + 1):
        copy.start()

    for copy in copies(block):
      copy.wait()
    slot = jax.lax.rem(block, 2)
    for head in range(num_heads):
      _add_head(
        queries[head],
        key_blocks[slot, head],
        value_blocks[slot, head],
        visible,
        (maxima.at[head], sums.at[head], totals.at[head]),
        rows_axis=int(rows_on_lanes),
        scale=scale,
        soft_cap=soft_cap,
      )

  num_words = words.shape[1] - has_window
  first_visible = words[:, num_words:] if has_window else None

  def add_prefix_block(block, _):
    rows = _rows_of(block, block_kv)
    add_block(block, rows >= first_visible if has_window else None)

  def add_tree_block(block, _):
    rows = _rows_of(block, block_kv)
    columns = [words[:, i : i + 1] for i in range(num_words)]
    visible = mask_words.is_visible(columns, rows - prefix_length)
    add_block(
      block, visible & (rows >= first_visible) if has_window else visible
    )

  maxima[...] = jnp.full_like(maxima, reference.MASKED_SCORE)
  sums[...] = jnp.zeros_like(sums)
  totals[...] = jnp.zeros_like(totals)

  @pl.when(first_block < end_block)
  def _():
    for copy in copies(first_block):
      copy.start()

  # A block of the prefix alone needs no mask.
  tree_block = jnp.clip(
    jax.lax.div(prefix_length, block_kv), first_block, end_block
  )
  jax.lax.fori_loop(first_block, tree_block, add_prefix_block, None)
  jax.lax.fori_loop(tree_block, end_block, add_tree_block, None)
  _write(out, sums, totals)


def _write(out, sums, totals):
  """Writes the weighted means; a row that sees nothing gives zeros."""
  for head in range(out.shape[0]):
    total = sums[head][:, :1]
    weights = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
    out[head] = (totals[head] * weights).astype(out.dtype)


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


def _rows_of(block, block_kv):
  rows = jax.lax.broadcasted_iota(jnp.int32, (1, block_kv), 1)
  return rows + block * block_kv


def _add_head(
  queries,
  keys,
  values,
  visible,
  state,
  *,
  rows_axis,
  scale,
  soft_cap,
):
  """Takes one block of one head into the running softmax.

  Args:
    queries: [N, E].
    keys: [K, E] or [E, K].
    values: as keys.
    visible: bool[T, K] or None: all.
    state: maxima f32[N, 128], sums f32[N, 128] and totals f32[N, E] so far,
      changed in place.
    rows_axis: of keys and values.
    scale: of the scores.
    soft_cap: of the scores.
  """
  maxima, sums, totals = state
  precision = (
    jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
  )
  product = functools.partial(
    jax.lax.dot_general,
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  scores = product(queries, keys, (((1,), (1 - rows_axis,)), ((), ()))) * scale
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  if visible is not None:
    bias = jnp.where(visible, 0.0, reference.MASKED_SCORE)
    num_tokens, num_keys = bias.shape
    by_head = scores.reshape(-1, num_tokens, num_keys)
    is_seen = jnp.broadcast_to(bias[None], by_head.shape).reshape(scores.shape)
    scores = jnp.where(is_seen == 0, scores, reference.MASKED_SCORE)
  old_max = maxima[:, :1]
  new_max = jnp.maximum(old_max, scores.max(axis=1, keepdims=True))
  weights = jnp.exp(scores - new_max)
  if visible is not None:
    weights = jnp.where(scores > reference.MASKED_SCORE / 2, weights, 0.0)
  decay = jnp.exp(old_max - new_max)
  new_sum = sums[:, :1] * decay + weights.sum(axis=1, keepdims=True)
  maxima[...] = jnp.broadcast_to(new_max, maxima.shape)
  sums[...] = jnp.broadcast_to(new_sum, sums.shape)
  totals[...] = totals[...] * decay + product(
    weights.astype(values.dtype), values, (((1,), (rows_axis,)), ((), ()))
  )


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _divisor(size: int, limit: int) -> int:
  """Returns the largest divisor of `size` that is at most `limit`."""
  return max(n for n in range(1, min(size, limit) + 1) if size % n == 0)
