"""The ancestor mask as bits, 32 columns to a word.

A tree has few nodes, so its mask fits into registers. As bits it can be read
at any offset: no aligned copy is needed for a prefix of any length, and no
mask is read from memory for the rows of the prefix.

Legend: B rows, T query tokens, M cache rows of the tree, W words.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import products, tiles

BITS = 32
_MAX_WORDS = 8


def check(queries: jax.Array, most_rows: int, tree_size: int) -> None:
  """Raises NotImplementedError for what no kernel can do.

  Args:
    queries: [B, T, G, Q, E].
    most_rows: most rows of queries for a kv head that the kernel can do.
    tree_size: M.
  """
  products.check_dtype(queries.dtype)
  num_rows = queries.shape[1] * queries.shape[3]
  tiles.check_most(num_rows, most_rows, 'rows of queries for a kv head')
  if tree_size > _MAX_WORDS * BITS:
    raise NotImplementedError(
      f'a mask of {tree_size} columns is wider than {_MAX_WORDS * BITS}'
    )


def pack(tree_mask: jax.Array) -> jax.Array:
  """Returns i32[B, T, W] of bool[B, T, M]; bit j of word w is column 32 w + j.

  Args:
    tree_mask: True where a token may attend.
  """
  size = tree_mask.shape[2]
  num_words = -(-size // BITS)
  padding = num_words * BITS - size
  bits = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, padding)))
  bits = bits.reshape(*tree_mask.shape[:2], num_words, BITS)
  weights = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
  words = jnp.where(bits, weights[None, None, None], jnp.uint32(0)).sum(
    axis=3, dtype=jnp.uint32
  )
  return jax.lax.bitcast_convert_type(words, jnp.int32)


def is_visible(words: list[jax.Array], offsets: jax.Array) -> jax.Array:
  """Returns bool[T, S], where a token may attend; for use in kernels.

  Args:
    words: W times i32[T, 1].
    offsets: i32[1, S] of cache rows from the end of the prefix. Rows before
      it are visible, rows after the last word are not.
  """
  visible = jnp.broadcast_to(offsets < 0, (words[0].shape[0], offsets.shape[1]))
  for i, word in enumerate(words):
    shift = offsets - i * BITS
    is_mine = (shift >= 0) & (shift < BITS)
    # A shift by 32 or more is undefined.
    bit = jax.lax.shift_right_logical(
      jnp.broadcast_to(word, visible.shape),
      jnp.broadcast_to(jnp.where(is_mine, shift, 0), visible.shape),
    )
    visible |= is_mine & ((bit & 1) == 1)
  return visible
