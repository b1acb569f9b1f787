"""Tree attention as a Pallas Triton kernel for NVIDIA GPUs.

One launch. The visible rows of a kv head are split over several programs, so
that one request occupies the whole device; the program that ends last combines
their partial results (as FlashDecoding does in a second launch).

Legend: B rows, T query tokens, M cache rows of the tree, S cache capacity, G
kv heads, Q query heads for each kv head, E head_dim, W mask words, N rows of
queries (T x Q with padding), K block_kv, P splits.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program, tiles
from kernels_pallas.tree_attention import mask_words, reference

_MIN_QUERY_ROWS = 16  # of a product in Triton
_MAX_QUERY_ROWS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Tiles of the kernel.

  Attributes:
    block_kv: cache rows of a product, a power of two.
    num_splits: programs that share the rows of a kv head.
    num_warps: of a program.
    num_stages: blocks in flight.
    CANDIDATES: values that `tune_kernels` tries.
  """

  CANDIDATES: ClassVar[dict[str, tuple[int, ...]]] = {
    'block_kv': (32, 64, 128),
    'num_splits': (4, 8, 16, 32),
    'num_warps': (4, 8),
    'num_stages': (2, 3, 4),
  }
  block_kv: int = 64
  num_splits: int = 16
  num_warps: int = 4
  num_stages: int = 2

  def __post_init__(self):
    tiles.check_powers(self, 'block_kv', 'num_warps')
    tiles.check_multiples(self, 1, 'num_splits', 'num_stages')


def default_config(
  num_rows: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> Config:
  """Returns tiles that fit into the registers of a program; not measured.

  Args:
    num_rows: N.
    head_dim: E.
    dtype: of the cache. Products of float32 are made without matrix units.
  """
  is_wide = num_rows * head_dim > 64 * 128
  block_kv = 64
  if jnp.dtype(dtype) == jnp.float32:
    block_kv = 16 if is_wide or head_dim > 128 else 32
  return Config(block_kv=block_kv, num_warps=8 if is_wide else 4)


def check(
  queries_shape: tuple[int, ...],
  keys_shape: tuple[int, ...],
  tree_size: int,
  dtype: jax.typing.DTypeLike,
) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  del keys_shape
  _, num_tokens, _, num_groups, head_dim = queries_shape
  mask_words.check(dtype, num_tokens * num_groups, _MAX_QUERY_ROWS, tree_size)
  if head_dim not in (16, 32, 64, 128, 256):
    raise NotImplementedError(
      f'head_dim {head_dim} is no power of two from 16 to 256'
    )


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
  config: Config | None = None,
  interpret: bool = False,
) -> jax.Array:
  """See `reference.tree_attention`; raises NotImplementedError as `check`."""
  check(queries.shape, keys.shape, tree_mask.shape[2], queries.dtype)
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  capacity = keys.shape[2]
  num_rows = max(pl.next_power_of_2(num_tokens * num_groups), _MIN_QUERY_ROWS)
  config = config or default_config(num_rows, head_dim, keys.dtype)
  num_splits = config.num_splits
  words = mask_words.pack(tree_mask)

  def whole_row(*shape):
    """One row of the batch."""
    return pl.BlockSpec(
      (None, *shape), lambda b, g, p: (b, *(0 for _ in shape))
    )

  def whole_head(*shape):
    """One kv head of one row."""
    return pl.BlockSpec(
      (None, None, *shape), lambda b, g, p: (b, g, *(0 for _ in shape))
    )

  tokens_spec = pl.BlockSpec(
    (None, num_tokens, None, num_groups, head_dim),
    lambda b, g, p: (b, 0, g, 0, 0),
  )
  partial_shapes = [
    ((num_splits, num_rows, head_dim), jnp.float32),
    ((num_splits, num_rows), jnp.float32),
    ((num_splits, num_rows), jnp.float32),
    ((1,), jnp.int32),
  ]
  heads = (batch, num_kv_heads)
  out, *_ = pl.pallas_call(
    functools.partial(
      _kernel,
      num_rows=num_rows,
      config=config,
      scale=scale,
      window=window,
      soft_cap=soft_cap,
      tree_size=tree_mask.shape[2],
      interpret=interpret,
    ),
    grid=(*heads, num_splits),
    in_specs=[
      whole_row(),
      tokens_spec,
      whole_row(*words.shape[1:]),
      whole_row(num_tokens),
      whole_head(capacity, head_dim),
      whole_head(capacity, head_dim),
      whole_head(1),
    ],
    out_specs=[
      tokens_spec,
      *(whole_head(*shape) for shape, _ in partial_shapes),
    ],
    out_shape=[
      jax.ShapeDtypeStruct(queries.shape, queries.dtype),
      *(
        jax.ShapeDtypeStruct((*heads, *shape), dtype)
        for shape, dtype in partial_shapes
      ),
    ],
    input_output_aliases={6: 4},
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name='tree_attention',
  )(
    prefix_lengths,
    queries,
    words,
    positions,
    keys,
    values,
    jnp.zeros((*heads, 1), jnp.int32),
  )
  return out


def _kernel(
  # Inputs:
  prefix_length,  # i32[]
  queries,  # [T, Q, E]
  words,  # i32[T, W] mask
  positions,  # i32[T]
  keys,  # [S, E]
  values,  # [S, E]
  _,  # i32[1] zero, the same memory as num_done
  # Outputs:
  out,  # [T, Q, E]
  totals,  # f32[P, N, E] partial results
  maxima,  # f32[P, N]
  sums,  # f32[P, N]
  num_done,  # i32[1]
  *,
  num_rows: int,
  config: Config,
  scale: float,
  window: int | None,
  soft_cap: float | None,
  tree_size: int,
  interpret: bool,
):
  num_tokens, num_groups, head_dim = queries.shape
  split = pl.program_id(2)
  index = jnp.arange(num_rows)
  is_row = index < num_tokens * num_groups
  token = index // num_groups
  places = (
    token[:, None],
    (index % num_groups)[:, None],
    jnp.arange(head_dim)[None],
  )
  tile = plgpu.load(queries.at[places], mask=is_row[:, None], other=0)
  columns = [
    plgpu.load(words.at[token, word], mask=is_row, other=0)[:, None]
    for word in range(words.shape[1])
  ]
  first, first_row = None, 0
  if window is not None:
    far = jnp.iinfo(jnp.int32).max
    first = plgpu.load(positions.at[token], mask=is_row, other=far)
    first -= window - 1
    first_row = jnp.maximum(first.min(axis=0), 0)
    first = first[:, None]
  prefix_length = prefix_length[()]
  end = jnp.minimum(prefix_length + tree_size, keys.shape[0])
  blocks, tree_block = _blocks_of(split, first_row, prefix_length, end, config)
  add = functools.partial(
    _add_block,
    queries=tile,
    keys=keys,
    values=values,
    block_kv=config.block_kv,
    end=end,
    first=first,
    scale=scale,
    soft_cap=soft_cap,
  )
  carry = _nothing(num_rows, head_dim)
  # A block of the prefix alone needs no mask.
  carry = jax.lax.fori_loop(blocks[0], tree_block, add, carry)
  carry = jax.lax.fori_loop(
    tree_block,
    blocks[1],
    functools.partial(add, columns=columns, prefix_length=prefix_length),
    carry,
  )
  maximum, total_weight, total = carry
  maxima[split] = maximum
  sums[split] = total_weight
  totals[split] = total

  @pl.when(
    last_program.is_last(num_done, config.num_splits, interpret=interpret)
  )
  def _():
    combined = _combine(maxima, sums, totals, config.num_splits)
    plgpu.store(
      out.at[places], combined.astype(out.dtype), mask=is_row[:, None]
    )


def _nothing(num_rows, head_dim):
  """Returns maxima f32[N], sums f32[N] and totals f32[N, E] of no rows."""
  return (
    jnp.full((num_rows,), reference.MASKED_SCORE, jnp.float32),
    jnp.zeros((num_rows,), jnp.float32),
    jnp.zeros((num_rows, head_dim), jnp.float32),
  )


def _blocks_of(split, first_row, prefix_length, end, config):
  """Returns this split's range of blocks, and where its masked ones begin."""
  first_block = jax.lax.div(first_row, config.block_kv)
  end_block = pl.cdiv(end, config.block_kv)
  share = pl.cdiv(jnp.maximum(end_block - first_block, 0), config.num_splits)
  start = first_block + split * share
  stop = jnp.maximum(jnp.minimum(start + share, end_block), start)
  tree_block = jax.lax.div(prefix_length, config.block_kv)
  tree_block = jnp.minimum(jnp.maximum(tree_block, start), stop)
  return (start, stop), tree_block


def _add_block(
  block,
  carry,
  *,
  queries,
  keys,
  values,
  block_kv,
  end,
  first,
  scale,
  soft_cap,
  columns=None,
  prefix_length=None,
):
  """Takes one block into the running softmax.

  Args:
    block: its number.
    carry: maxima f32[N], sums f32[N] and totals f32[N, E] so far.
    queries: [N, E].
    keys: [S, E].
    values: [S, E].
    block_kv: K.
    end: of the rows.
    first: i32[N, 1] first visible row, or None.
    scale: of the scores.
    soft_cap: of the scores.
    columns: the mask's words i32[N, 1]; None where no mask is needed.
    prefix_length: where the mask begins.
  """
  maximum, total_weight, total = carry
  rows = block * block_kv + jnp.arange(block_kv)
  place = pl.ds(block * block_kv, block_kv)
  is_row = None if columns is None else (rows < end)[:, None]
  fill = None if columns is None else 0

  def load(ref):
    return plgpu.load(ref.at[place], mask=is_row, other=fill)

  precision = (
    jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
  )
  scores = plgpu.dot(queries, load(keys), trans_b=True, precision=precision)
  scores = scores.astype(jnp.float32) * scale
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  visible = None
  if columns is not None:
    visible = mask_words.is_visible(columns, (rows - prefix_length)[None])
    visible &= (rows < end)[None]
  if first is not None:
    near = rows[None] >= first
    visible = near if visible is None else visible & near
  if visible is not None:
    scores = jnp.where(visible, scores, reference.MASKED_SCORE)
  new_max = jnp.maximum(maximum, scores.max(axis=1))
  weights = jnp.exp(scores - new_max[:, None])
  if visible is not None:
    weights = jnp.where(visible, weights, 0.0)
  decay = jnp.exp(maximum - new_max)
  added = plgpu.dot(
    weights.astype(values.dtype), load(values), precision=precision
  )
  return (
    new_max,
    total_weight * decay + weights.sum(axis=1),
    total * decay[:, None] + added,
  )


def _combine(maxima, sums, totals, num_splits):
  """Returns f32[N, E] of all partial results."""

  def add(split, carry):
    maximum, total_weight, total = carry
    other = maxima[split]
    new_max = jnp.maximum(maximum, other)
    decay, weight = jnp.exp(maximum - new_max), jnp.exp(other - new_max)
    added_weight = sums[split] * weight
    added = totals[split] * weight[:, None]
    return (
      new_max,
      total_weight * decay + added_weight,
      total * decay[:, None] + added,
    )

  nothing = _nothing(*totals.shape[1:])
  _, total_weight, total = jax.lax.fori_loop(0, num_splits, add, nothing)
  # A row that sees nothing gives zeros.
  return total / jnp.where(total_weight == 0, 1.0, total_weight)[:, None]
