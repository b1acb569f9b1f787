"""Drafters that look at the texts on the devices."""

import abc

import jax

from swiftspec_jax.step.rows import Rows


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
