"""Greedy match: a draft token stands if it is the target's best token."""

import jax
import jax.numpy as jnp

from swiftspec_jax import types


def verify(proposal: types.Proposal, logits: jax.Array) -> types.Verdict:
  """Verifies a chain at temperature zero.

  Args:
    proposal: K draft tokens for each row.
    logits: f32[B, K + 1, V] of the target, adjusted.
  """
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  matches = proposal.token_ids == best[:, :-1]
  num_accepted = count_accepted(matches, proposal.num_drafted)
  # Accepted tokens equal the best ones, so the output is a prefix of them.
  is_output = jnp.arange(best.shape[1])[None] <= num_accepted[:, None]
  return types.Verdict(
    token_ids=jnp.where(is_output, best, types.PLACEHOLDER_TOKEN_ID),
    num_accepted=num_accepted,
  )


def count_accepted(accepts: jax.Array, num_drafted: jax.Array) -> jax.Array:
  """Length of the run of True from the first draft token on.

  Args:
    accepts: bool[B, K].
    num_drafted: i32[B] draft tokens that count.

  Returns:
    i32[B].
  """
  is_drafted = jnp.arange(accepts.shape[1])[None] < num_drafted[:, None]
  run = jnp.cumprod((accepts & is_drafted).astype(jnp.int32), axis=1)
  return run.sum(axis=1)
