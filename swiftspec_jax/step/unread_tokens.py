"""What a draft has not read yet of the texts on the target's devices.

Legend: U rows, S tokens of the longest text, T = K + 1 nodes, C tokens of a
chunk, P pages, Z tokens of one, H features.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from swiftspec_jax.tree import arrays, types


@struct.dataclass(frozen=True, kw_only=True)
class Texts:
  """What a draft may read of the target's state."""

  token_ids: jax.Array  # i32[U, S] prompt and output so far
  lengths: jax.Array  # i32[U] tokens known
  # Of features that may go to other devices: those are replicated.
  sharding: NamedSharding = struct.field(pytree_node=False)
  # [P, Z, H] of the tokens whose keys and values are known, and the pages
  # i32[U, any] of each row; None where the draft reads none.
  features: jax.Array | None = None
  page_table: jax.Array | None = None


@functools.partial(jax.jit, static_argnames='num_nodes')
def unread_of(
  texts: Texts, num_read: jax.Array, follows: jax.Array, *, num_nodes: int
) -> tuple[types.PackedVerified, jax.Array]:
  """Returns what a draft has not read of the texts that it follows.

  Args:
    texts: texts of the rows.
    num_read: i32[U] tokens that the draft has read, at most T less.
    follows: bool[U].
    num_nodes: T; static.

  Returns:
    Tokens for the draft, and `num_read` afterwards.
  """
  places = num_read[:, None] + jnp.arange(num_nodes)[None]
  num_new = jnp.where(follows, texts.lengths - num_read, 0)
  verified = types.VerifiedTokens(
    token_ids=arrays.take(texts.token_ids, places), num_tokens=num_new
  ).pack()
  num_read = num_read + num_new
  if texts.features is None:
    return verified, num_read
  # Each token is read with the feature of the one before it.
  places = jnp.where(places < num_read[:, None], places - 1, -1)
  features = _features_at(texts, texts.page_table, places)
  return (verified, features), num_read


@functools.partial(jax.jit, static_argnames='size')
def read_at(
  texts: Texts,
  num_read: jax.Array,
  slot: jax.Array,
  start: jax.Array,
  *,
  size: int,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
  """Returns a part of a text as `read_row` takes it.

  Args:
    texts: texts of the rows.
    num_read: i32[U] tokens that the draft has read.
    slot: i32[] the row.
    start: i32[] place of the part's first token; after the text it stands for
      that of the last one.
    size: C; static.

  Returns:
    i32[1, C + 2] tokens, their start, and the place after the last token;
    features [1, C, H] or None; and `num_read` afterwards.
  """
  length = texts.lengths[slot]
  start = jnp.clip(length - 1, 0, start)
  places = start + jnp.arange(size)
  # An invented text, of which a time is measured, has no tokens.
  end = jnp.clip(length, start + 1, start + size)
  token_ids = texts.token_ids.at[slot, places].get(mode='fill', fill_value=0)
  chunk = jnp.concatenate([token_ids, jnp.stack([start, end])])[None]
  num_read = num_read.at[slot].set(end)
  if texts.features is None:
    return chunk, None, num_read
  places = jnp.where(places < end, places - 1, -1)[None]
  pages = texts.page_table[slot][None]
  return chunk, _features_at(texts, pages, places), num_read


def _features_at(texts, page_table, positions):
  """Returns features bf16[r, n, H] at positions i32[r, n]; 0 at negative ones.

  Args:
    texts: texts with features.
    page_table: i32[r, any] of the rows.
    positions: i32[r, n].
  """
  num_pages, page_size, _ = texts.features.shape
  found = arrays.take(page_table, positions // page_size)
  found = jnp.where(positions < 0, num_pages, found)
  features = texts.features.at[found, positions % page_size].get(
    mode='fill', fill_value=0
  )
  # Rounding costs a little acceptance at most, and halves what travels.
  return jax.lax.with_sharding_constraint(
    features.astype(jnp.bfloat16), texts.sharding
  )
