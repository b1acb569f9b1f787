"""Control flow that XLA runs without copying what it carries."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar('Carry')


def run_if(
  condition: jax.Array, step: Callable[[Carry], Carry], carry: Carry
) -> Carry:
  """Returns `step(carry)` where the condition bool[] holds, else the carry.

  XLA copies caches into and out of a conditional; a loop of at most one turn
  updates them in place.
  """
  return jax.lax.while_loop(
    lambda c: c[0],
    lambda c: (jnp.zeros_like(c[0]), step(c[1])),
    (condition, carry),
  )[1]
