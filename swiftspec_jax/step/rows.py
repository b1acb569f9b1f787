"""What the target's devices know of the rows in the slots of an engine.

The host reads verdicts late. So it plans a step with the lengths that it has
read, and the devices bring the step to where the rows are by then.

Legend: B slots, S tokens of the longest text.
"""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax.tree import arrays

PyTree = TypeVar('PyTree')


@struct.dataclass(frozen=True, kw_only=True)
class Rows:
  """Texts of the slots. The last token of one is not in the cache yet."""

  token_ids: jax.Array  # i32[B, S] prompt and output so far
  lengths: jax.Array  # i32[B] tokens known
  prompt_lengths: jax.Array  # i32[B]
  max_lengths: jax.Array  # i32[B] at which the output ends

  @property
  def room(self) -> jax.Array:
    """i32[B]: tokens that the outputs can still get."""
    return jnp.maximum(self.max_lengths - self.lengths, 0)


@jax.jit
def assign(rows: Rows, new: Rows, is_new: jax.Array) -> Rows:
  """Returns the rows with those of bool[B] replaced."""

  def choose(ours, theirs):
    return jnp.where(is_new.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours)

  return jax.tree.map(choose, rows, new)


def append_tokens(
  rows: Rows, token_ids: jax.Array, num_emitted: jax.Array
) -> Rows:
  """Writes the emitted of the tokens i32[B, T] after the known ones."""
  steps = jnp.arange(token_ids.shape[1])[None]
  places = rows.lengths[:, None] + steps
  is_emitted = steps < num_emitted[:, None]
  return rows.replace(
    token_ids=arrays.put(rows.token_ids, places, token_ids, is_emitted),
    lengths=rows.lengths + num_emitted,
  )


@functools.partial(jax.jit, donate_argnames='state')
def insert_row(state: PyTree, row: PyTree, slot: jax.Array) -> PyTree:
  """Puts a state of one row into row `slot` i32[] of a batch (donated)."""
  return jax.tree.map(
    lambda batch, one: jax.lax.dynamic_update_index_in_dim(
      batch, one[0], slot, axis=0
    ),
    state,
    row,
  )
