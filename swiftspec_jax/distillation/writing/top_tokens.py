"""The next-token distribution of a large batch: its largest entries, and draws.

Nothing sorts the vocabulary: it is looked at in groups. Legend: B rows, V
vocabulary, K stored entries of the distribution.
"""

import jax
import jax.numpy as jnp
from flax import struct

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
  num_rows, vocab_size = logits.shape
  grouped = _grouped(logits)
  # The K largest lie in the K groups with the largest maxima.
  num_groups = min(num_stored, grouped.shape[1])
  maxima = grouped.max(-1)
  _, groups = jax.lax.top_k(maxima, num_groups)
  candidates = jnp.take_along_axis(grouped, groups[:, :, None], axis=1)
  values, places = jax.lax.top_k(candidates.reshape(num_rows, -1), num_stored)
  groups = jnp.take_along_axis(groups, places // _GROUP, axis=1)
  best = maxima.max(-1, keepdims=True)  # from `values` XLA takes 5 times longer
  total = jnp.exp(logits - best).sum(-1, keepdims=True)
  normaliser = best + jnp.log(total)
  token_ids = groups * _GROUP + places % _GROUP
  # Where the vocabulary is smaller than K.
  token_ids = jnp.minimum(token_ids, vocab_size - 1)
  return TopTokens(token_ids=token_ids, log_probs=values - normaliser)


def _grouped(logits):
  """[B, V] -> [B, groups, 128], filled up with -inf."""
  padding = -logits.shape[1] % _GROUP
  logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
  return logits.reshape(len(logits), -1, _GROUP)


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
