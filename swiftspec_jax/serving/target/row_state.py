"""What the target's devices know of the rows in the slots of an engine.

The host reads verdicts late. So it plans a step with the lengths that it has
read, and the devices bring the step to where the rows are by then.

Legend: B slots, S tokens of the longest text.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass(frozen=True, kw_only=True)
class RowState:
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
def seat(rows: RowState, new: RowState, is_new: jax.Array) -> RowState:
  """Returns the rows with those of bool[B] replaced."""

  def choose(ours, theirs):
    return jnp.where(is_new.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours)

  return jax.tree.map(choose, rows, new)
