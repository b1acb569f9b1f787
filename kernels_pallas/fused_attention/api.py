"""Rotation, write and attention by what suits devices and shape.

Legend: B rows, T new tokens, M cache rows of the tree, S cache capacity, G kv
heads, Q query heads for each kv head, E head_dim.
"""

import functools

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import calls, dispatch
from kernels_pallas.few_rows import api as few_rows_api
from kernels_pallas.fused_attention import reference
from kernels_pallas.native import library
from kernels_pallas.tree_attention import api as attention_api


def fused_attention(
  heads: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  starts: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array | None,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rotates and writes new tokens, and attends from them.

  Args:
    heads: [B, T, G, Q + 2, E] queries, key and value of each kv head, not
      rotated.
    cos: f32[B, T, E / 2] cosines of the angles.
    sin: f32[B, T, E / 2] sines.
    keys: [B, G, S, E] keys of the cache.
    values: [B, G, S, E] values of the cache.
    starts: i32[B] first row of the new tokens, not before the prefix's end.
      They must fit.
    prefix_lengths: i32[B] rows that every token sees.
    tree_mask: bool[B, T, M] or None, as in `tree_attention.api`, whose
      arguments are the others, too.
    positions: i32[B, T] positions of the tokens.
    sinks: [G, Q] or None.
    scale: factor of the scores.
    window: tokens that are visible.
    implementation: one of `dispatch.IMPLEMENTATIONS`. Where there is no kernel
      for all of it, the name is that of the code of `tree_attention`.
    sharding: sharding of keys and values, whose first two axes alone may be
      sharded. None means JAX's default device.

  Returns:
    [B, T, G, Q, E], and the keys and values.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  options = {'scale': scale, 'window': window}
  arrays = (heads, cos, sin, keys, values, starts, prefix_lengths)
  chosen = attention_api.choose(
    'fused_attention',
    reference.queries_of(heads),
    keys,
    tree_mask,
    window,
    sinks,
    calls.for_triton_alone(implementation),
    sharding,
  )
  if chosen == dispatch.REFERENCE:
    attend = functools.partial(
      attention_api.tree_attention,
      implementation=implementation,
      sharding=sharding,
    )
    return reference.fused_attention(
      *arrays, tree_mask, positions, sinks, attend=attend, **options
    )
  arrays += attention_api.for_kernels(tree_mask, positions, sinks)
  rows, groups = calls.axes_of(sharding, 2)
  tokens, cache, of_row = P(rows, None, groups), P(rows, groups), P(rows)
  return calls.run(
    'fused_attention',
    chosen,
    arrays,
    options,
    sharding,
    (tokens, *[of_row] * 2, *[cache] * 2, *[of_row] * 4, P(groups)),
    (tokens, cache, cache),
  )


def is_native_on(mesh: Mesh | None, implementation: str) -> bool:
  """Returns whether the kernels of one CPU run, which suit prompts, too."""
  if few_rows_api.usable_on(mesh, implementation) == dispatch.REFERENCE:
    return False
  try:
    library.check('attention')
  except NotImplementedError:
    return False
  return True
