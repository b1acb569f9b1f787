"""Tree attention in plain JAX: the definition that the kernels follow.

Legend: B rows, T query tokens, M cache rows of the tree, S cache capacity, G
kv heads, Q query heads for each kv head, E head_dim.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import products

TOLERANCES = products.TOLERANCES

# What a masked score becomes. Finite, so that a row that sees nothing gives
# finite numbers instead of NaN.
MASKED_SCORE = -1e30


def tree_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  prefix_lengths: jax.Array,
  tree_mask: jax.Array | None,
  positions: jax.Array,
  sinks: jax.Array | None = None,
  *,
  scale: float,
  window: int | None = None,
) -> jax.Array:
  """Attention of new tokens to a prefix, seen by all, and a tree after it.

  SwiftSpec paper, section 3.3: the mask covers the tree alone. The arguments
  are those of `api.tree_attention`.
  """
  visible = seen_rows(
    prefix_lengths, tree_mask, positions, keys.shape[2], window
  )
  # However the mask was made, the softmax rounds the same.
  visible = products.apart(visible)
  return attention_part(queries, keys, values, visible, scale, sinks)[0]


def seen_rows(
  prefix_lengths: jax.Array,
  tree_mask: jax.Array | None,
  positions: jax.Array,
  num_rows: int,
  window: int | None,
) -> jax.Array:
  """Returns bool[B, T, S], the rows of S that each token attends to.

  The arguments are those of `tree_attention`.
  """
  rows = jnp.arange(num_rows)[None, None]
  if tree_mask is None:
    chain = jnp.arange(positions.shape[1])[None] + prefix_lengths[:, None]
    visible = rows <= chain[:, :, None]
  else:
    visible = visible_rows(prefix_lengths, tree_mask, num_rows)
  if window is not None:
    # Rows of the prefix and of a chain lie at their position; a tree is
    # shallower than the window (the caller checks).
    visible &= positions[:, :, None] - rows < window
  return visible


def visible_rows(
  prefix_lengths: jax.Array, tree_mask: jax.Array, num_rows: int
) -> jax.Array:
  """Returns bool[B, T, S]: the whole prefix, and after it the mask.

  Args:
    prefix_lengths: i32[B] rows of the prefix.
    tree_mask: bool[B, T, M] over the M rows after the prefix.
    num_rows: S, rows of the cache.
  """
  offsets = jnp.arange(num_rows)[None] - prefix_lengths[:, None]
  size = tree_mask.shape[2]
  after = jnp.take_along_axis(
    tree_mask,
    jnp.clip(offsets, 0, size - 1)[:, None],
    axis=2,
    mode='promise_in_bounds',
  )
  is_behind = (offsets >= 0) & (offsets < size)
  return (offsets < 0)[:, None] | (after & is_behind[:, None])


def attention_part(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  visible: jax.Array,
  scale: float,
  sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns attention to some of the rows, and its share in that to all.

  Args:
    queries: [B, T, G, Q, E].
    keys: [B, G, S, E].
    values: [B, G, S, E].
    visible: bool[B, T, S], True where a query may attend.
    scale: factor of the scores, which are in float32.
    sinks: [G, Q] or None, as in `api.tree_attention`.

  Returns:
    [B, T, G, Q, E], zeros for a token that sees nothing; and the logarithms
    f32[B, T, G, Q] of the sums that the softmax divides by. `merge_parts` puts
    the parts together.
  """
  batch, num_tokens, num_kv_heads, num_groups, head_dim = queries.shape
  # Tokens and query groups side by side: one product per kv head.
  grouped = jnp.moveaxis(queries, 1, 3).reshape(
    batch, num_kv_heads, num_groups * num_tokens, head_dim
  )
  scores = jnp.einsum(
    'bgne,bgse->bgns',
    grouped,
    keys,
    preferred_element_type=jnp.float32,
  ).reshape(batch, num_kv_heads, num_groups, num_tokens, -1)
  scores *= scale
  scores = jnp.where(visible[:, None, None], scores, MASKED_SCORE)
  probs, log_sums = _softmax(scores, sinks)
  output = products.einsum(
    'bgns,bgse->bgne',
    probs.astype(values.dtype).reshape(
      batch, num_kv_heads, num_groups * num_tokens, -1
    ),
    values,
  )
  output = output.reshape(batch, num_kv_heads, num_groups, num_tokens, head_dim)
  sees_any = visible.any(axis=2)[:, None, None, :, None]
  output = jnp.where(sees_any, output, jnp.zeros((), output.dtype))
  return jnp.moveaxis(output, 3, 1), jnp.moveaxis(log_sums, 3, 1)


def merge_parts(
  part: jax.Array,
  log_sums: jax.Array,
  axis_name: str,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns attention to the rows of all devices f32[B, T, G, Q, E].

  FlashDecoding: each part counts by its share of the softmax.

  Args:
    part: [B, T, G, Q, E] this device's `attention_part`.
    log_sums: f32[B, T, G, Q] of it.
    axis_name: axis of the mesh that the rows are shared along.
    sinks: [G, Q] or None, as in `api.tree_attention`; no part has them.
  """
  total = jax.nn.logsumexp(jax.lax.all_gather(log_sums, axis_name), axis=0)
  if sinks is not None:
    total = jnp.logaddexp(total, sinks.astype(jnp.float32)[None, None])
  share = jnp.exp(log_sums - total)[..., None]
  return jax.lax.psum(part.astype(jnp.float32) * share, axis_name)


def _softmax(scores, sinks):
  """Returns the weights of scores f32[B, G, Q, T, S], and logarithms of sums.

  Sums are over the last axis.
  """
  if sinks is None:
    log_sums = jax.nn.logsumexp(scores, axis=-1)
    return jax.nn.softmax(scores, axis=-1), log_sums
  sinks = sinks.astype(jnp.float32)[None, :, :, None, None]
  best = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
  weights = jnp.exp(scores - best)
  total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - best)
  return weights / total, (best + jnp.log(total))[..., 0]
