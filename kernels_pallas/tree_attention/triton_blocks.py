"""The running softmax of attention kernels for NVIDIA GPUs, in Triton.

What `tree_attention` and `paged_attention` have in common. The visible rows of
a kv head are split over several programs, so that one request occupies the
whole device. The program that ends last combines their partial results, as
FlashDecoding does in a second launch. Where the rows lie is up to them.

Legend: B rows, T query tokens, S cache rows, W mask words. G kv heads, Q query
heads for each of them, E head_dim. N rows of queries (T x Q with padding), K
block_kv, P splits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program
from kernels_pallas.tree_attention import mask_words, reference

MAX_QUERY_ROWS = 128
_MIN_QUERY_ROWS = 16  # of a product in Triton


def num_rows_of(num_tokens: int, num_groups: int) -> int:
  """Returns N."""
  return max(pl.next_power_of_2(num_tokens * num_groups), _MIN_QUERY_ROWS)


def launch(
  kernel: Callable[..., None],
  by_row: Sequence[jax.Array],
  queries: jax.Array,
  words: jax.Array,
  positions: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  store_spec: pl.BlockSpec,
  sinks: jax.Array | None,
  *,
  config: Any,
  name: str,
  interpret: bool,
  **options,
) -> tuple[jax.Array, jax.Array]:
  """Launches a kernel that calls `attend` over rows, kv heads and splits.

  Args:
    kernel: function of a part of `by_row`, then of what `attend` takes, from
      queries to results; and of the options, `config` and `interpret`.
    by_row: arrays [B, ...], of which a program has its row.
    queries: [B, T, G, Q, E].
    words: i32[B, T, W].
    positions: i32[B, T].
    keys: keys; `store_spec` takes a part of them.
    values: values, as keys.
    store_spec: part of keys and values that a program has.
    sinks: [G, Q] or None, as in `api.tree_attention`.
    config: tiles.
    name: name of the kernel.
    interpret: whether it is interpreted.
    **options: options of the kernel.

  Returns:
    [B, T, G, Q, E], and the logarithms f32[B, T, G, Q] of the sums of the
    softmax, without those of sinks.
  """
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  num_rows = num_rows_of(num_tokens, num_groups)
  num_splits = config.num_splits

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
  # One more input, which `attend` finds in front of the results.
  by_head = [] if sinks is None else [sinks.astype(jnp.float32)]
  out, _, maxima, sums, _ = pl.pallas_call(
    functools.partial(kernel, config=config, interpret=interpret, **options),
    grid=(*heads, num_splits),
    in_specs=[
      *(whole_row(*x.shape[1:]) for x in by_row),
      tokens_spec,
      whole_row(*words.shape[1:]),
      whole_row(num_tokens),
      store_spec,
      store_spec,
      *(
        pl.BlockSpec((None, num_groups), lambda b, g, p: (g, 0))
        for _ in by_head
      ),
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
    input_output_aliases={len(by_row) + 5 + len(by_head): 4},
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name=name,
  )(
    *by_row,
    queries,
    words,
    positions,
    keys,
    values,
    *by_head,
    jnp.zeros((*heads, 1), jnp.int32),
  )
  log_sums = jax.nn.logsumexp(maxima, axis=2, b=sums)[
    ..., : num_tokens * num_groups
  ]
  log_sums = jnp.maximum(log_sums, reference.MASKED_SCORE)  # sees nothing
  log_sums = log_sums.reshape(*heads, num_tokens, num_groups)
  return out, jnp.swapaxes(log_sums, 1, 2)


def attend(
  queries,
  words,
  positions,
  keys,
  values,
  results,
  *,
  prefix_length,
  end,
  place_fn: Callable[..., Any],
  config: Any,
  scale: float,
  window: int | None,
  soft_cap: float | None,
  interpret: bool,
  token_count: jax.Array | None = None,
):
  """Attends from one row's tokens to this split's share of a kv head.

  Args:
    queries: [T, Q, E].
    words: i32[T, W] mask.
    positions: i32[T].
    keys: keys of the kv head, which `place_fn` points into.
    values: values, as keys.
    results: sinks f32[Q], where there are any; the counter, which is the same
      memory as the last one; then refs of [T, Q, E], partial results
      f32[P, N, E], f32[P, N] and f32[P, N], and of the counter i32[1].
    prefix_length: i32[] rows that every token sees.
    end: i32[] rows that any token may see.
    place_fn: function that returns where the rows of a block lie, of its number
      i32[], the rows i32[K], and which of them there are: bool[K], or None
      for all.
    config: tiles.
    scale: factor of the scores.
    window: width of the layer's window, or None.
    soft_cap: limit of the scores, or None.
    interpret: whether it is interpreted.
    token_count: i32[] tokens that are no padding, which gives zeros.
  """
  *sinks, _, out, totals, maxima, sums, num_done = results
  num_tokens, num_groups, head_dim = queries.shape
  num_rows = num_rows_of(num_tokens, num_groups)
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
  blocks, tree_block = _blocks_of(split, first_row, prefix_length, end, config)
  add = functools.partial(
    _add_block,
    queries=tile,
    keys=keys,
    values=values,
    place_fn=place_fn,
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
    nothing = _nothing(num_rows, head_dim)
    if sinks:
      # Each takes the weight of a score without a value.
      sink = plgpu.load(sinks[0].at[index % num_groups])
      nothing = (sink, jnp.ones_like(sink), nothing[2])
    combined = _combine(maxima, sums, totals, config.num_splits, nothing)
    if token_count is not None:
      combined = jnp.where((token < token_count)[:, None], combined, 0.0)
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
  place_fn,
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
    block: number of the block.
    carry: maxima f32[N], sums f32[N] and totals f32[N, E] so far.
    queries: [N, E].
    keys: keys of the kv head.
    values: values, as keys.
    place_fn: function, as `attend` takes it.
    block_kv: K.
    end: i32[] rows that any token may see.
    first: i32[N, 1] first visible row, or None.
    scale: factor of the scores.
    soft_cap: limit of the scores, or None.
    columns: the mask's words i32[N, 1]; None where no mask is needed.
    prefix_length: row at which the mask begins.
  """
  maximum, total_weight, total = carry
  rows = block * block_kv + jnp.arange(block_kv)
  is_row = None if columns is None else rows < end
  place = place_fn(block, rows, is_row)
  is_row = None if columns is None else is_row[:, None]
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


def _combine(maxima, sums, totals, num_splits, carry):
  """Returns f32[N, E] of all partial results and what `carry` has so far."""

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

  _, total_weight, total = jax.lax.fori_loop(0, num_splits, add, carry)
  # A row that sees nothing gives zeros.
  return total / jnp.where(total_weight == 0, 1.0, total_weight)[:, None]
