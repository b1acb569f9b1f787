"""Rotation and write of new tokens, for attention kernels in Triton.

Each program rotates the queries it needs in its registers. The first program of
a kv head rotates the new keys, too. It attends to the new tokens, and writes
those of its block; nobody reads what is being written.

Legend: T tokens of a block, J tokens with padding, W mask words, Q query heads
for each kv head, E head_dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.tree_attention import triton_blocks


def indices(num_tokens: int) -> jax.Array:
  """Returns i32[J] of the tokens of a block, and more."""
  return jnp.arange(triton_blocks.num_rows_of(num_tokens, 1))


def attend(
  heads,
  cos,
  sin,
  words,
  positions,
  keys,
  values,
  results,
  *,
  first_row: jax.Array,
  num_tokens: jax.Array | int,
  places: jax.Array,
  is_stored: jax.Array,
  first_token: jax.Array,
  blocks_before: jax.Array | int = 0,
  **options,
):
  """Attends from a block of new tokens, and writes their keys and values.

  Args:
    heads: [tokens, Q + 2, E] queries, key and value of all new tokens.
    cos: f32[tokens, E / 2].
    sin: f32[tokens, E / 2].
    words: i32[T, W] mask.
    positions: i32[T].
    keys: keys of the kv head, as in `triton_blocks.attend`.
    values: values, as keys.
    results: results of `triton_blocks.attend`, then where keys and values are
      written.
    first_row: i32[] number of the first new row.
    num_tokens: i32[] tokens of the block.
    places: i32[J] where those are written, in keys and values.
    is_stored: bool[J] which of them are.
    first_token: i32[] the first one among all tokens.
    blocks_before: i32[] blocks of T new tokens of the same row, in front of it.
    **options: options of `triton_blocks.attend`.
  """
  *results, written_keys, written_values = results
  size = words.shape[0]
  _, num_heads, head_dim = heads.shape
  index = indices(size)
  columns = jnp.arange(head_dim)[None]
  num_before = blocks_before * size
  rotated = functools.partial(_rotated, heads, cos, sin)

  def load_new(num_blocks):
    row = num_blocks * size + index
    is_new = ((index < size) & (row < num_before + num_tokens))[:, None]
    token = (first_token - num_before + row)[:, None]
    key = rotated((token, num_heads - 2, columns), is_new)
    value = token, num_heads - 1, columns
    value = triton_blocks.load_queries(heads, value, is_new)
    return key.astype(keys.dtype), value.astype(values.dtype)

  @pl.when(pl.program_id(2) == 0)
  def _():
    written = written_keys, written_values
    for ref, new in zip(written, load_new(blocks_before), strict=True):
      plgpu.store(
        ref.at[places[:, None], columns], new, mask=is_stored[:, None]
      )

  triton_blocks.attend(
    rotated,
    words,
    positions,
    keys,
    values,
    results,
    first_token=first_token,
    new=triton_blocks.NewRows(
      first=first_row, num_rows=num_before + num_tokens, load_fn=load_new
    ),
    **options,
  )


def _rotated(heads, cos, sin, places, is_row) -> jax.Array:
  """Returns rotated heads [N, E], as `triton_blocks.attend` wants queries.

  The other half of a pair is loaded, too: registers cannot be sliced.
  """
  token, head, column = places
  half = heads.shape[2] // 2
  is_first = column < half
  load = functools.partial(plgpu.load, mask=is_row, other=0)
  own, other = (
    load(heads.at[token, head, place]).astype(jnp.float32)
    for place in (column, jnp.where(is_first, column + half, column - half))
  )
  angle = token, column & (half - 1)
  sines = load(sin.at[angle])
  rotated = own * load(cos.at[angle]) + other * jnp.where(
    is_first, -sines, sines
  )
  return rotated.astype(heads.dtype)
