"""The next-token distribution of a large batch: its largest entries, and draws.

Legend: B rows, V vocabulary, K stored entries of the distribution.
"""

import jax
import jax.numpy as jnp
from flax import struct

from kernels_pallas.vocabulary import largest as largest_lib

_GROUP = 128  # of the vocabulary


@struct.dataclass(frozen=True, kw_only=True)
class TopTokens:
  """The K most probable next tokens, best first, at temperature 1."""

  token_ids: jax.Array  # i32[..., K]
  log_probs: jax.Array  # f32[..., K]


def largest(logits: jax.Array, num_stored: int) -> TopTokens:
  """Returns the K largest entries of the distribution.

  Args:
    logits: f32[B, V].
    num_stored: K.
  """
  log_probs, token_ids = largest_lib.top_log_probs(logits, num_stored)
  return TopTokens(token_ids=token_ids, log_probs=log_probs)


def draw(
  logits: jax.Array, top: TopTokens, temperatures: jax.Array, uniform: jax.Array
) -> jax.Array:
  """Draws from softmax(logits / temperature): first a group, then in it.

  Args:
    logits: f32[B, V].
    top: largest entries of the distribution.
    temperatures: f32[B]; 0 gets anything.
    uniform: f32[2, B] in [0, 1).

  Returns:
    i32[B].
  """
  inverse = 1 / jnp.where(temperatures > 0, temperatures, 1.0)
  best = jnp.take_along_axis(logits, top.token_ids[:, :1], axis=1)
  weights = jnp.exp((logits - best) * inverse[:, None])
  weights = jnp.pad(weights, ((0, 0), (0, -logits.shape[1] % _GROUP)))
  weights = weights.reshape(len(logits), -1, _GROUP)
  group = _pick(weights.sum(-1), uniform[0])
  inside = jnp.take_along_axis(weights, group[:, None, None], axis=1)[:, 0]
  return group * _GROUP + _pick(inside, uniform[1])


def _pick(weights, uniform):
  """Draws an index of each row of weights [B, X] with uniform numbers [B]."""
  sums = jnp.cumsum(weights, axis=1)
  threshold = uniform[:, None] * sums[:, -1:]
  return jnp.argmax(sums > threshold, axis=1)
