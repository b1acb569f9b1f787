"""Attention of many rows that go on from few prefixes.

Legend: F prefixes, C rows for each, B = F * C rows, P longest prefix, N rows of
the cache after it, G kv heads, Q query heads for each, E head_dim.
"""

import jax.numpy as jnp

from kernels_pallas import products
from kernels_pallas.tree_attention import reference


def attend(queries, prefix, own, in_prefix, in_own, sinks):
  """Attends to the shared prefix and to the rows' own tokens.

  Args:
    queries: [F, G, C, Q, E], scaled.
    prefix: keys [F, G, E, P] and values [F, G, P, E].
    own: keys [B, G, E, N] and values [B, G, N, E].
    in_prefix: bool[F, C or 1, P] visible, to each row or to all.
    in_own: bool[B, N] visible.
    sinks: [G, Q] or None, as in `tree_attention.api`.

  Returns:
    [F, G, C, Q, E].
  """
  num_prefixes, num_heads, per_prefix, num_groups, head_dim = queries.shape
  batch = num_prefixes * per_prefix

  def to_rows(x):  # [F, G, C, Q, X] -> [B, G, Q, X]
    return x.transpose(0, 2, 1, 3, 4).reshape(
      batch, num_heads, num_groups, x.shape[-1]
    )

  def from_rows(x):
    return x.reshape(
      num_prefixes, per_prefix, num_heads, num_groups, x.shape[-1]
    ).transpose(0, 2, 1, 3, 4)

  side_by_side = queries.reshape(num_prefixes, num_heads, -1, head_dim)
  to_prefix = jnp.einsum(
    'fgne,fgep->fgnp',
    side_by_side,
    prefix[0],
    preferred_element_type=jnp.float32,
  )
  to_own = jnp.einsum(
    'bgqe,bges->bgqs',
    to_rows(queries).astype(own[0].dtype),
    own[0],
    preferred_element_type=jnp.float32,
  )
  if in_prefix.shape[1] > 1:
    in_prefix = jnp.repeat(in_prefix, num_groups, axis=1)
  to_prefix = jnp.where(in_prefix[:, None], to_prefix, reference.MASKED_SCORE)
  to_own = jnp.where(in_own[:, None, None], to_own, reference.MASKED_SCORE)
  shape = (num_prefixes, num_heads, per_prefix, num_groups, 1)
  best = jnp.maximum(
    to_prefix.max(-1).reshape(shape), from_rows(to_own.max(-1, keepdims=True))
  )
  if sinks is not None:
    sinks = sinks.astype(jnp.float32)[None, :, None, :, None]
    best = jnp.maximum(best, sinks)
  to_prefix = jnp.exp(to_prefix - best.reshape(*to_prefix.shape[:3], 1))
  to_own = jnp.exp(to_own - to_rows(best))
  total = to_prefix.sum(-1).reshape(shape) + from_rows(
    to_own.sum(-1, keepdims=True)
  )
  if sinks is not None:
    total += jnp.exp(sinks - best)
  dtype = queries.dtype
  attended = products.einsum(
    'fgnp,fgpe->fgne', to_prefix.astype(dtype), prefix[1]
  ).reshape(queries.shape)
  attended = attended + from_rows(
    products.einsum('bgqs,bgse->bgqe', to_own.astype(own[1].dtype), own[1])
  )
  return (attended / total).astype(dtype)
