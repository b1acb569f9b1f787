"""A draft of any quality: knows the output, and errs as often as it is told.

For studying speed without a good draft. The draft model runs as always, but
its children are put together from a known continuation: at every position the
true token has rank r among them with probability a (1 - a)^r, drawn by seed
and position. These are also the log-probabilities that the children get, so
the tree is that of a calibrated draft. The target verifies as always: the
output is its own.

Legend: B rows, W leaves, K children, S tokens.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.tree import types


@struct.dataclass(frozen=True, kw_only=True)
class Reference:
  """The known texts."""

  token_ids: jax.Array  # i32[B, S] prompt and output, then placeholders
  seeds: jax.Array  # u32[B] of the draws


def make_reference(
  token_ids: Sequence[int], seed: int, capacity: int
) -> Reference:
  """Returns the host arrays of one row.

  Args:
    token_ids: prompt and output.
    seed: seed of the draws.
    capacity: S; what does not fit is not known.
  """
  known = np.full((1, capacity), types.PLACEHOLDER_TOKEN_ID, np.int32)
  known[0, : len(token_ids)] = token_ids[:capacity]
  return Reference(token_ids=known, seeds=np.full(1, seed, np.uint32))


def force(
  reference: Reference,
  child_token_ids: jax.Array,
  child_log_probs: jax.Array,
  token_ids: jax.Array,
  positions: jax.Array,
  acceptance: float,
) -> tuple[jax.Array, jax.Array]:
  """Puts the true token among the children of each leaf that is true itself.

  Args:
    reference: true tokens.
    child_token_ids: i32[B, W, K] of the draft model, best first.
    child_log_probs: f32[B, W, K] of the draft model; what has probability zero
      there keeps it.
    token_ids: i32[B, W] of the leaves.
    positions: i32[B, W] of the leaves.
    acceptance: a in (0, 1], probability that the best child is the true token.

  Returns:
    The children i32[B, W, K] and their log-probabilities f32[B, W, K].
  """
  known, num_children = reference.token_ids, child_token_ids.shape[2]
  end = known.shape[1] - 1
  here = jnp.take_along_axis(known, jnp.clip(positions, 0, end), axis=1)
  following = jnp.clip(positions + 1, 0, end)
  truth = jnp.take_along_axis(known, following, axis=1)
  is_true = (token_ids == here) & (truth != types.PLACEHOLDER_TOKEN_ID)
  keys = sampling_lib.position_keys(
    reference.seeds, following, sampling_lib.Stream.DRAFT
  )
  uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)
  ranks = jnp.arange(num_children)[None, None]
  chances = acceptance * (1.0 - acceptance) ** ranks.astype(jnp.float32)
  # The rank is the number of better children that are wrong.
  is_worse = uniform[:, :, None] >= jnp.cumsum(chances, axis=2)
  rank = is_worse.sum(axis=2, keepdims=True, dtype=jnp.int32)
  # The true token must not occur twice: where it is a child anyway, that place
  # gets the last one, which is then pushed out or left out. (A sum, as XLA CPU
  # sorts the whole vocabulary for a top-k whose result is sliced.)
  is_last = ranks == num_children - 1
  last_child = jnp.where(is_last, child_token_ids, 0).sum(2, keepdims=True)
  wrong = jnp.where(
    child_token_ids == truth[:, :, None], last_child, child_token_ids
  )
  places = ranks - (ranks > rank).astype(jnp.int32)
  forced = jnp.take_along_axis(wrong, places, axis=2)
  forced = jnp.where(ranks == rank, truth[:, :, None], forced)
  is_true = is_true[:, :, None]
  is_left_out = is_true & (rank == num_children) & is_last
  is_left_out |= child_log_probs == -jnp.inf
  return (
    jnp.where(is_true, forced, child_token_ids),
    jnp.where(is_left_out, -jnp.inf, jnp.log(chances)),
  )
