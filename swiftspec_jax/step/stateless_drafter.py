"""Drafters that look at the texts on the devices."""

import abc
import functools

import jax
import jax.numpy as jnp

from swiftspec_jax.step.rows import Rows
from swiftspec_jax.tree import types


class StatelessDrafter(abc.ABC):
  """Base of drafters that need neither parameters nor a state.

  A drafter is a frozen dataclass of plain values, as it is a static argument.
  It runs on the target's devices, so the host need not know the text.

  Attributes:
    num_speculative_tokens: most tokens of a draft (K).
  """

  num_speculative_tokens: int

  @abc.abstractmethod
  def propose(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Returns drafts for the tokens after `rows.lengths`.

    Args:
      rows: texts of the U slots.

    Returns:
      Tokens i32[U, K], and how many of them count, i32[U].
    """


@functools.partial(jax.jit, static_argnames=('drafter', 'max_length'))
def propose(
  rows: Rows,
  lengths: jax.Array,
  *,
  drafter: StatelessDrafter,
  max_length: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns drafts after the texts of all slots.

  Args:
    rows: texts of the slots.
    lengths: i32[U] tokens that are wanted.
    drafter: static drafter.
    max_length: K; static.

  Returns:
    Tokens i32[U, K], and how many of them there are, i32[U].
  """
  token_ids, found = drafter.propose(rows)
  found = jnp.minimum(found, lengths)
  token_ids = token_ids[:, :max_length]
  missing = max_length - token_ids.shape[1]
  token_ids = jnp.pad(token_ids, ((0, 0), (0, missing)))
  is_found = jnp.arange(max_length)[None] < found[:, None]
  # What is no token is not what the target chooses.
  return jnp.where(is_found, token_ids, types.PLACEHOLDER_TOKEN_ID), found
