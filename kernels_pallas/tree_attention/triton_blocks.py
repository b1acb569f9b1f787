"""The running softmax of attention kernels for NVIDIA GPUs, in Triton.

What the attention kernels have in common. The visible rows of a kv head are
split over several programs, so that one request occupies the whole device. The
program that ends last combines their partial results, as FlashDecoding does in
a second launch. Where the rows lie is up to the kernels.

Legend: B rows, T query tokens, S cache rows, W mask words. G kv heads, Q query
heads for each of them, E head_dim. N rows of queries (T x Q with padding), K
block_kv, P splits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program, tiles
from kernels_pallas.tree_attention import reference, running_softmax

MAX_QUERY_ROWS = 128


def num_rows_of(num_tokens: int, num_groups: int) -> int:
  """Returns N."""
  return max(pl.next_power_of_2(num_tokens * num_groups), tiles.LEAST_SIDE)


def row_spec(*shape: int) -> pl.BlockSpec:
  """Returns the part of a program in [B, ...]: one row of the batch."""
  return pl.BlockSpec((None, *shape), lambda b, g, p: (b, *(0 for _ in shape)))


def head_spec(*shape: int) -> pl.BlockSpec:
  """Returns the part of a program in [B, G, ...]: a kv head of one row."""
  return pl.BlockSpec(
    (None, None, *shape), lambda b, g, p: (b, g, *(0 for _ in shape))
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRows:
  """Rows that a launch writes, and so reads from elsewhere.

  Attributes:
    first: i32[] number of the first one.
    num_rows: i32[] number of them.
    load_fn: function of i32[] that returns keys [J, E] and values [J, E] of as
      many rows as a block has tokens: those after that many such blocks.
  """

  first: jax.Array
  num_rows: jax.Array | int
  load_fn: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def launch(
  kernel: Callable[..., None],
  whole: Sequence[jax.Array],
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
  interpret: bool = False,
  writes: bool = False,
  **options,
) -> tuple[jax.Array, ...]:
  """Launches a kernel that calls `attend` over rows, kv heads and splits.

  Args:
    kernel: function of `whole`, of a part of `by_row`, then of what `attend`
      takes, from queries to results; and of the options, `config` and
      `interpret`.
    whole: arrays that all programs have.
    by_row: arrays [B, ...], of which a program has its row.
    queries: [N, G, Q, E] of the tokens of all rows; [N, G, Q + 2, E] with the
      key and the value of a token after its queries, where the kernel writes.
    words: i32[B, T, W].
    positions: i32[B, T].
    keys: keys; `store_spec` takes a part of them.
    values: values, as keys.
    store_spec: part of keys and values that a program has.
    sinks: [G, Q] or None, as in `api.tree_attention`.
    config: tiles.
    name: name of the kernel.
    interpret: whether it is interpreted.
    writes: whether the kernel writes keys and values. They are then its last
      results, in the memory of the inputs.
    **options: options of the kernel.

  Returns:
    [N, G, Q, E], and the logarithms f32[B, T, G, Q] of the sums of the
    softmax, without those of sinks; then keys and values, where the kernel
    writes.
  """
  batch, num_tokens = words.shape[:2]
  num_all, num_kv_heads, num_heads, head_dim = queries.shape
  num_groups = num_heads - (2 if writes else 0)
  num_rows = num_rows_of(num_tokens, num_groups)
  num_splits = config.num_splits

  def of_tokens(num_heads):
    return pl.BlockSpec(
      (num_all, None, num_heads, head_dim), lambda b, g, p: (0, g, 0, 0)
    )

  partial_shapes = [
    ((num_splits, num_rows, head_dim), jnp.float32),
    ((num_splits, num_rows), jnp.float32),
    ((num_splits, num_rows), jnp.float32),
  ]
  heads = (batch, num_kv_heads)
  counters, counter = last_program.counters(
    batch * num_kv_heads, lambda b, g, _: b * num_kv_heads + g
  )
  # One more input, which `attend` finds in front of the results.
  by_head = [] if sinks is None else [sinks.astype(jnp.float32)]
  written = [keys, values] if writes else []
  first_written = len(whole) + len(by_row) + 3
  out, _, maxima, sums, *written = pl.pallas_call(
    functools.partial(kernel, config=config, interpret=interpret, **options),
    grid=(*heads, num_splits),
    in_specs=[
      *(
        pl.BlockSpec(x.shape, lambda b, g, p, n=x.ndim: (0,) * n) for x in whole
      ),
      *(row_spec(*x.shape[1:]) for x in by_row),
      of_tokens(num_heads),
      row_spec(*words.shape[1:]),
      row_spec(num_tokens),
      store_spec,
      store_spec,
      *(
        pl.BlockSpec((None, num_groups), lambda b, g, p: (g, 0))
        for _ in by_head
      ),
      counter,
    ],
    out_specs=[
      of_tokens(num_groups),
      *(head_spec(*shape) for shape, _ in partial_shapes),
      *[store_spec] * len(written),
    ],
    out_shape=[
      jax.ShapeDtypeStruct(
        (num_all, num_kv_heads, num_groups, head_dim), queries.dtype
      ),
      *(
        jax.ShapeDtypeStruct((*heads, *shape), dtype)
        for shape, dtype in partial_shapes
      ),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written),
    ],
    input_output_aliases={
      first_written + i: 4 + i for i in range(len(written))
    },
    compiler_params=plgpu.CompilerParams(
      num_warps=config.num_warps, num_stages=config.num_stages
    ),
    interpret=interpret,
    name=name,
  )(
    *whole,
    *by_row,
    queries,
    words,
    positions,
    keys,
    values,
    *by_head,
    counters,
  )
  log_sums = jax.nn.logsumexp(maxima, axis=2, b=sums)[
    ..., : num_tokens * num_groups
  ]
  log_sums = jnp.maximum(log_sums, reference.MASKED_SCORE)  # sees nothing
  log_sums = log_sums.reshape(*heads, num_tokens, num_groups)
  return out, jnp.swapaxes(log_sums, 1, 2), *written


def load_queries(queries, places, is_row):
  """Returns rotated queries [N, E], for `attend`, of [tokens, Q, E]."""
  return plgpu.load(queries.at[places], mask=is_row, other=0)


def attend(
  queries_fn,
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
  interpret: bool,
  window: int | None = None,
  first_token: jax.Array,
  token_count: jax.Array | None = None,
  stores_padding: bool = True,
  new: NewRows | None = None,
):
  """Attends from one row's tokens to this split's share of a kv head.

  Args:
    queries_fn: function that returns queries [N, E], of tokens i32[N, 1],
      heads i32[N, 1] and columns i32[1, E], and of which of them there are:
      bool[N, 1]. Others may lie outside of the array.
    words: i32[T, W] mask.
    positions: i32[T].
    keys: keys of the kv head, which `place_fn` points into.
    values: values, as keys.
    results: sinks f32[Q], where there are any; the counter i32[1]; then refs of
      [tokens, Q, E], and partial results f32[P, N, E], f32[P, N] and f32[P, N].
    prefix_length: i32[] rows that every token sees.
    end: i32[] rows that any token may see.
    place_fn: function that returns where the rows of a block lie, of its number
      i32[], the rows i32[K], and which of them there are: bool[K], or None
      for all.
    config: tiles.
    scale: factor of the scores.
    window: width of the layer's window, or None.
    interpret: whether it is interpreted.
    first_token: i32[] the first of the row's T tokens, among all tokens.
    token_count: i32[] tokens of the row that are no padding; None for T.
    stores_padding: whether padding gives zeros. If not, the tokens in its place
      are those of others.
    new: rows that the kernel writes; None where it writes none.
  """
  *sinks, num_done, out, totals, maxima, sums = results
  num_tokens = words.shape[0]
  _, num_groups, head_dim = out.shape
  num_rows = num_rows_of(num_tokens, num_groups)
  split = pl.program_id(2)
  index = jnp.arange(num_rows)
  is_row = index < num_tokens * num_groups
  token = index // num_groups
  places = (
    (first_token + token)[:, None],
    (index % num_groups)[:, None],
    jnp.arange(head_dim)[None],
  )
  is_token = is_row if token_count is None else is_row & (token < token_count)
  tile = queries_fn(places, is_token[:, None])
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
  options = {'queries': tile, 'first': first, 'scale': scale}
  mask = {'columns': columns, 'prefix_length': prefix_length}
  add = functools.partial(
    _add_block,
    keys=keys,
    values=values,
    place_fn=place_fn,
    block_kv=config.block_kv,
    end=end,
    new=new,
    **options,
  )
  carry = running_softmax.nothing(num_rows, head_dim)
  # A block of the prefix alone needs no mask.
  carry = jax.lax.fori_loop(blocks[0], tree_block, add, carry)
  carry = jax.lax.fori_loop(
    tree_block, blocks[1], functools.partial(add, **mask), carry
  )
  if new is not None:
    # A loop of no turns but in the first split.
    is_first = (split == 0).astype(jnp.int32)
    num_turns = is_first * pl.cdiv(new.num_rows, num_tokens)
    add_new = functools.partial(_add_new, new, num_tokens, **options, **mask)
    carry = jax.lax.fori_loop(0, num_turns, add_new, carry)
  maximum, total_weight, total = carry
  maxima[split] = maximum
  sums[split] = total_weight
  totals[split] = total

  @pl.when(
    last_program.is_last(num_done, config.num_splits, interpret=interpret)
  )
  def _():
    nothing = running_softmax.nothing(num_rows, head_dim)
    if sinks:
      # Each takes the weight of a score without a value.
      sink = plgpu.load(sinks[0].at[index % num_groups])
      nothing = (sink, jnp.ones_like(sink), nothing[2])
    combined = running_softmax.combine(
      maxima, sums, totals, config.num_splits, nothing
    )
    if token_count is not None:
      combined = jnp.where(is_token[:, None], combined, 0.0)
    is_stored = is_row if stores_padding else is_token
    plgpu.store(
      out.at[places], combined.astype(out.dtype), mask=is_stored[:, None]
    )


def _blocks_of(split, first_row, prefix_length, end, config):
  """Returns this split's range of blocks, and where its masked ones begin."""
  first_block = jax.lax.div(first_row, config.block_kv)
  end_block = pl.cdiv(end, config.block_kv)
  share = pl.cdiv(jnp.maximum(end_block - first_block, 0), config.num_splits)
  start = first_block + split * share
  stop = jnp.maximum(jnp.minimum(start + share, end_block), start)
  tree_block = jax.lax.div(jnp.minimum(prefix_length, end), config.block_kv)
  tree_block = jnp.minimum(jnp.maximum(tree_block, start), stop)
  return (start, stop), tree_block


def _add_block(
  block,
  carry,
  *,
  keys,
  values,
  place_fn,
  block_kv,
  end,
  new,
  columns=None,
  **options,
):
  """Takes one block into the running softmax.

  Args:
    block: number of the block.
    carry: maxima f32[N], sums f32[N] and totals f32[N, E] so far.
    keys: keys of the kv head.
    values: values, as keys.
    place_fn: function, as `attend` takes it.
    block_kv: K.
    end: i32[] rows that any token may see.
    new: rows that are left out, as they are being written, or None.
    columns: the mask's words i32[N, 1]; None where no mask is needed.
    **options: options of `running_softmax.add_rows`.
  """
  rows = block * block_kv + jnp.arange(block_kv)
  is_row = mask = fill = None
  if columns is not None:
    is_row = rows < end
    if new is not None:
      is_row &= (rows < new.first) | (rows >= new.first + new.num_rows)
    mask, fill = is_row[:, None], 0
  place = place_fn(block, rows, is_row)

  def load(ref):
    return plgpu.load(ref.at[place], mask=mask, other=fill)

  return running_softmax.add_rows(
    carry,
    rows,
    is_row,
    functools.partial(load, keys),
    functools.partial(load, values),
    columns=columns,
    **options,
  )


def _add_new(new, size, turn, carry, **options):
  """Takes some new rows into the running softmax, as many as a block has."""
  keys, values = new.load_fn(turn)
  index = jnp.arange(len(keys))
  row = turn * size + index
  return running_softmax.add_rows(
    carry,
    new.first + row,
    (index < size) & (row < new.num_rows),
    lambda: keys,
    lambda: values,
    **options,
  )
