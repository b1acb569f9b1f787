"""The move of kept cache rows in plain JAX: what the kernels follow.

Legend: B rows, T rows to keep, W rows of the window, S cache capacity, G kv
heads, E head_dim.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Implementations must give equal numbers.
TOLERANCES: dict[str, float] = {}


def kv_commit(
  caches: Sequence[jax.Array],
  starts: jax.Array,
  path: jax.Array,
  *,
  num_rows: int,
) -> list[jax.Array]:
  """Returns the caches with the rows moved.

  The arguments are those of `api.kv_commit`.
  """
  move = functools.partial(_move, num_rows=num_rows)
  if len(starts) > 1:
    return [jax.vmap(move)(cache, starts, path) for cache in caches]
  return [move(cache[0], starts[0], path[0])[None] for cache in caches]


def _move(cache, start, path, *, num_rows):
  """Moves rows of [G, S, E]."""
  # Rows are taken out of a window: XLA for TPUs transposes what it gathers
  # from, and that must not be the whole cache.
  num_rows = min(num_rows, cache.shape[1])
  first = jnp.minimum(start, cache.shape[1] - num_rows)
  window = jax.lax.dynamic_slice_in_dim(cache, first, num_rows, axis=1)
  source = jnp.clip(path + (start - first), 0, num_rows - 1)
  # All rows are read before any is written: overlap is safe.
  kept = jnp.take_along_axis(window, source[None, :, None], axis=1)
  return jax.lax.dynamic_update_slice_in_dim(cache, kept, start, axis=1)
