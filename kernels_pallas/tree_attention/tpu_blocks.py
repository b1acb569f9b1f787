"""The running softmax of attention kernels for the TensorCore of a TPU.

What `tree_attention` and `paged_attention` have in common: how queries and the
mask lie in VMEM, and the loop over double-buffered blocks of keys and values.
Where the blocks come from is up to them.

Legend: B rows, T query tokens, M cache rows of the tree, W mask words. G kv
heads, Q query heads for each of them, H kv heads of a program, E head_dim. N
rows of queries (Q x T with padding), K rows of a block.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import products, tiles
from kernels_pallas.tree_attention import mask_words, reference

_MAX_QUERY_ROWS = 256
_SUBLANES = 8
_BUFFER_BYTES = 8 * 2**20  # of the blocks in VMEM, of which 16 MiB are free


def check(queries: jax.Array, tree_size: int) -> None:
  """Raises NotImplementedError for queries that no kernel can do."""
  mask_words.check(queries, _MAX_QUERY_ROWS, tree_size)
  head_dim = queries.shape[4]
  if head_dim not in (64, 128, 256):
    raise NotImplementedError(f'head_dim {head_dim} is not 64, 128 or 256')


def group(queries: jax.Array) -> jax.Array:
  """Returns queries [B, T, G, Q, E] as [B, G, N, E], Q times the tokens.

  One token: the padding is of heads, and the mask the same for all of them.
  """
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  token_rows = _token_rows(num_tokens)
  num_rows = _round_up(num_groups * token_rows, _SUBLANES)
  grouped = jnp.pad(
    jnp.moveaxis(queries, 1, 3),
    (
      *((0, 0),) * 2,
      (0, num_rows // token_rows - num_groups),
      (0, token_rows - num_tokens),
      (0, 0),
    ),
  )
  return grouped.reshape(batch, num_kv_heads, num_rows, head_dim)


def group_sinks(
  sinks: jax.Array | None, num_rows: int, num_tokens: int
) -> list[jax.Array]:
  """Returns sinks [G, Q] as f32[G, N, 1], as `group` lays rows; or nothing.

  Args:
    sinks: [G, Q] or None, as in `api.tree_attention`.
    num_rows: N.
    num_tokens: T.
  """
  if sinks is None:
    return []
  token_rows = _token_rows(num_tokens)
  padding = num_rows // token_rows - sinks.shape[1]
  sinks = jnp.pad(sinks.astype(jnp.float32), ((0, 0), (0, padding)))
  return [jnp.repeat(sinks, token_rows, axis=1)[:, :, None]]


def with_ref(
  kernel: Callable[..., None], place: int, name: str
) -> Callable[..., None]:
  """Returns a kernel with one more ref, the `place`-th, as an option."""

  def kernel_with_ref(*refs):
    kernel(*refs[:place], *refs[place + 1 :], **{name: refs[place]})

  return kernel_with_ref


def ungroup(out: jax.Array, num_tokens: int, num_groups: int) -> jax.Array:
  """Returns what `group` has grouped: [B, T, G, Q, E]."""
  token_rows = _token_rows(num_tokens)
  out = out.reshape(*out.shape[:2], -1, token_rows, out.shape[3])
  return jnp.moveaxis(out[:, :, :num_groups, :num_tokens], 3, 1)


def pack_mask(
  tree_mask: jax.Array,
  positions: jax.Array,
  prefix_lengths: jax.Array,
  window: int | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the mask, and the first row that any token of a row may see.

  Args:
    tree_mask: bool[B, T, M].
    positions: i32[B, T] of the tokens.
    prefix_lengths: i32[B].
    window: width of the layer's window, or None.

  Returns:
    i32[B, T, W], with a window one more with the first visible row, and i32[B].
  """
  words = mask_words.pack(tree_mask)
  if window is None:
    first_rows = jnp.zeros_like(prefix_lengths)
  else:
    lows = jnp.maximum(positions - window + 1, 0)
    first_rows = lows.min(axis=1)
    words = jnp.concatenate([words, lows[:, :, None]], axis=2)
  num_tokens = words.shape[1]
  padding = _token_rows(num_tokens) - num_tokens
  return jnp.pad(words, ((0, 0), (0, padding), (0, 0))), first_rows


def num_heads_of(
  most_heads: int,
  num_kv_heads: int,
  row_bytes: int,
  block_kv: int,
  other_bytes: int = 0,
) -> int:
  """Returns H, so that two blocks of keys and two of values fit into VMEM.

  Args:
    most_heads: most that are wanted.
    num_kv_heads: G, which H divides.
    row_bytes: bytes of a row of one head.
    block_kv: K.
    other_bytes: bytes that a head needs besides.
  """
  bytes_per_head = 4 * block_kv * row_bytes + other_bytes
  fitting = max(_BUFFER_BYTES // bytes_per_head, 1)
  return divisor(num_kv_heads, min(most_heads, fitting))


def scratch(num_heads: int, num_rows: int, head_dim: int) -> list[pltpu.VMEM]:
  """Returns maxima, sums and totals of the running softmax."""
  return [
    *[pltpu.VMEM((num_heads, num_rows, tiles.LANES), jnp.float32)] * 2,
    pltpu.VMEM((num_heads, num_rows, head_dim), jnp.float32),
  ]


def attend(
  prefix_length,
  first_row,
  end,
  queries,
  words,
  out,
  state,
  *,
  start_fn: Callable[[jax.Array], None],
  wait_fn: Callable[[jax.Array], None],
  read_fn: Callable[[jax.Array, int, bool], tuple[jax.Array, jax.Array]],
  block_kv: int,
  rows_axis: int,
  scale: float,
  has_window: bool,
  sinks=None,
  log_sums=None,
):
  """Attends from one row's tokens to its visible rows.

  Args:
    prefix_length: i32[] rows that every token sees.
    first_row: i32[] first row that any token sees.
    end: i32[] rows that any token may see.
    queries: [H, N, E].
    words: i32[T, W] of `pack_mask`.
    out: [H, N, E].
    state: refs of `scratch`.
    start_fn: function that starts the copies of a block to slot block % 2.
    wait_fn: function that waits for these copies.
    read_fn: function that returns keys and values of a head of a copied block,
      [K, E] or [E, K]. With True rows may be after the end, and the values
      there must be finite.
    block_kv: K.
    rows_axis: index of the axis of rows, of keys and values.
    scale: factor of the scores.
    has_window: whether `words` have first rows.
    sinks: f32[H, N, 1], or None.
    log_sums: f32[H, N, 1] that gets the logarithms of the sums, or None.
  """
  maxima, sums, totals = state
  first_block = jax.lax.div(first_row, block_kv)
  end_block = jax.lax.div(end + block_kv - 1, block_kv)

  def add_block(block, visible, is_masked):
    @pl.when(block + 1 < end_block)
    def _():
      start_fn(block + 1)

    wait_fn(block)
    for head in range(queries.shape[0]):
      _add_head(
        queries[head],
        *read_fn(block, head, is_masked),
        visible,
        (maxima.at[head], sums.at[head], totals.at[head]),
        rows_axis=rows_axis,
        scale=scale,
      )

  num_words = words.shape[1] - has_window
  first_visible = words[:, num_words:] if has_window else None

  def add_prefix_block(block, _):
    rows = _rows_of(block, block_kv)
    add_block(block, rows >= first_visible if has_window else None, False)

  def add_tree_block(block, _):
    rows = _rows_of(block, block_kv)
    columns = [words[:, i : i + 1] for i in range(num_words)]
    visible = mask_words.is_visible(columns, rows - prefix_length)
    if has_window:
      visible &= rows >= first_visible
    add_block(block, visible, True)

  if sinks is None:
    maxima[...] = jnp.full_like(maxima, reference.MASKED_SCORE)
    sums[...] = jnp.zeros_like(sums)
  else:
    # Each takes the weight of a score without a value.
    maxima[...] = jnp.broadcast_to(sinks[...], maxima.shape)
    sums[...] = jnp.ones_like(sums)
  totals[...] = jnp.zeros_like(totals)

  @pl.when(first_block < end_block)
  def _():
    start_fn(first_block)

  # A block of the prefix alone needs no mask.
  tree_block = jnp.clip(
    jax.lax.div(prefix_length, block_kv), first_block, end_block
  )
  jax.lax.fori_loop(first_block, tree_block, add_prefix_block, None)
  jax.lax.fori_loop(tree_block, end_block, add_tree_block, None)
  _write(out, sums, totals)
  if log_sums is not None:
    found = maxima[:, :, :1] + jnp.log(sums[:, :, :1])
    log_sums[...] = jnp.maximum(found, reference.MASKED_SCORE)


def _write(out, sums, totals):
  """Writes the weighted means; a row that sees nothing gives zeros."""
  for head in range(out.shape[0]):
    total = sums[head][:, :1]
    weights = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
    out[head] = (totals[head] * weights).astype(out.dtype)


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
):
  """Takes one block of one head into the running softmax.

  Args:
    queries: [N, E].
    keys: [K, E] or [E, K].
    values: values, as keys.
    visible: bool[T, K] or None: all.
    state: maxima f32[N, 128], sums f32[N, 128] and totals f32[N, E] so far,
      changed in place.
    rows_axis: index of the axis of rows, of keys and values.
    scale: factor of the scores.
  """
  maxima, sums, totals = state
  product = functools.partial(
    jax.lax.dot_general,
    precision=products.precision(queries.dtype),
    preferred_element_type=jnp.float32,
  )
  scores = product(queries, keys, (((1,), (1 - rows_axis,)), ((), ()))) * scale
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


def _token_rows(num_tokens: int) -> int:
  return 1 if num_tokens == 1 else _round_up(num_tokens, _SUBLANES)


def divisor(size: int, limit: int) -> int:
  """Returns the largest divisor of `size` that is at most `limit`."""
  return max(n for n in range(1, min(size, limit) + 1) if size % n == 0)
