"""Blocks have padding: no token that counts sees it, and it sees nothing.

Legend: X blocks, T tokens of a block, padding included.
"""

import jax
import jax.numpy as jnp


def hide(
  num_tokens: jax.Array, tree_mask: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns mask and positions in which padding widens neither tree nor window.

  Args:
    num_tokens: i32[X] of the blocks.
    tree_mask: bool[X, T, T].
    positions: i32[X, T].
  """
  is_token = _is_token(num_tokens, positions.shape[1])
  mask = tree_mask & is_token[:, :, None] & is_token[:, None]
  return mask, jnp.where(is_token, positions, jnp.iinfo(jnp.int32).max)


def ends_of(
  prefix_lengths: jax.Array, num_tokens: jax.Array, capacity: int
) -> jax.Array:
  """Returns i32[X], after the rows that a block reads: none without tokens.

  Args:
    prefix_lengths: i32[X].
    num_tokens: i32[X].
    capacity: rows of a table.
  """
  ends = jnp.minimum(prefix_lengths + num_tokens, capacity)
  return jnp.where(num_tokens > 0, ends, 0)


def zero(attended: jax.Array, num_tokens: jax.Array) -> jax.Array:
  """Returns [X, T, ...] with zeros for padding.

  Args:
    attended: [X, T, ...].
    num_tokens: i32[X] of the blocks.
  """
  is_token = jnp.expand_dims(
    _is_token(num_tokens, attended.shape[1]), range(2, attended.ndim)
  )
  return jnp.where(is_token, attended, jnp.zeros((), attended.dtype))


def _is_token(num_tokens, size):
  """Returns bool[X, T]."""
  return jnp.arange(size)[None] < num_tokens[:, None]
