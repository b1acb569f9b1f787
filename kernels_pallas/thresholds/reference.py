"""Thresholds of top-k and top-p in plain JAX: what the kernels follow.

Legend: B rows, T query tokens, V vocabulary, C chunks, L tokens of a chunk.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import tiles
from kernels_pallas.thresholds import exact

# Implementations must give equal numbers.
TOLERANCES: dict[str, float] = {}


def find_thresholds(
  logits: jax.Array, top_ks: jax.Array | None, top_ps: jax.Array | None
) -> jax.Array:
  """See `api.find_thresholds`."""
  keys = exact.keys_of(logits)
  least = jnp.full(logits.shape[:2], exact.LEAST, jnp.int32)

  def is_kept(candidates):
    return keys >= candidates[:, :, None]

  def of_all_queries(values):
    goals = values.astype(jnp.float32)[:, None]
    return jnp.broadcast_to(goals, least.shape)

  if top_ks is not None:
    least = exact.search(
      lambda c: is_kept(c).sum(axis=-1, dtype=jnp.int32).astype(jnp.float32),
      of_all_queries(top_ks),
    )
  if top_ps is not None:
    highest = logits.max(axis=-1, keepdims=True)
    highest = jnp.broadcast_to(highest, logits.shape)
    weights = jnp.where(is_kept(least), exact.weights_of(logits, highest), 0)

    def measure(candidates):
      return _add_up(jnp.where(is_kept(candidates), weights, 0))

    goals = of_all_queries(top_ps) * _add_up(weights)
    least = jnp.maximum(least, exact.search(measure, goals))
  return exact.logits_of(least)


def _add_up(weights):
  """f32[B, T] of weights i32[B, T, V]."""
  shape = weights.shape
  padding = -shape[2] % tiles.LANES
  chunks = jnp.pad(weights, ((0, 0), (0, 0), (0, padding)))
  chunks = chunks.reshape(*shape[:2], -1, tiles.LANES)
  high, low = (part.sum(axis=2) for part in exact.limbs_of(chunks))
  return exact.add_up(high, low, (2,), keepdims=False)
