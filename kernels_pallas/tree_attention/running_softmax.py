"""A softmax over blocks of rows, for attention kernels in Triton.

Legend: N rows of queries, K rows of keys, E head_dim, P splits.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import products
from kernels_pallas.tree_attention import mask_words, reference


def nothing(num_rows, head_dim):
  """Returns maxima f32[N], sums f32[N] and totals f32[N, E] of no rows."""
  return (
    jnp.full((num_rows,), reference.MASKED_SCORE, jnp.float32),
    jnp.zeros((num_rows,), jnp.float32),
    jnp.zeros((num_rows, head_dim), jnp.float32),
  )


def add_rows(
  carry,
  rows,
  is_row,
  load_keys,
  load_values,
  *,
  queries,
  first,
  scale,
  columns=None,
  prefix_length=None,
):
  """Takes rows into the running softmax.

  Args:
    carry: maxima f32[N], sums f32[N] and totals f32[N, E] so far.
    rows: i32[K] numbers of the rows.
    is_row: bool[K] which of them there are; None for all.
    load_keys: function that returns the keys [K, E].
    load_values: function that returns the values [K, E].
    queries: [N, E].
    first: i32[N, 1] first visible row, or None.
    scale: factor of the scores.
    columns: the mask's words i32[N, 1]; None where no mask is needed.
    prefix_length: row at which the mask begins.
  """
  maximum, total_weight, total = carry
  precision = products.precision(queries.dtype)
  scores = plgpu.dot(queries, load_keys(), trans_b=True, precision=precision)
  scores = scores.astype(jnp.float32) * scale
  visible = None
  if columns is not None:
    visible = mask_words.is_visible(columns, (rows - prefix_length)[None])
    visible &= is_row[None]
  if first is not None:
    near = rows[None] >= first
    visible = near if visible is None else visible & near
  if visible is not None:
    scores = jnp.where(visible, scores, reference.MASKED_SCORE)
  new_max = jnp.maximum(maximum, scores.max(axis=1))
  weights = jnp.exp(scores - new_max[:, None])
  if visible is not None:
    weights = jnp.where(visible, weights, 0.0)
  decay = jnp.exp(maximum - new_max)
  values = load_values()
  added = plgpu.dot(weights.astype(values.dtype), values, precision=precision)
  return (
    new_max,
    total_weight * decay + weights.sum(axis=1),
    total * decay[:, None] + added,
  )


def combine(maxima, sums, totals, num_splits, carry):
  """Returns f32[N, E] of all partial results and what `carry` has so far."""

  def add(split, carry):
    maximum, total_weight, total = carry
    other = maxima[split]
    new_max = jnp.maximum(maximum, other)
    decay, weight = jnp.exp(maximum - new_max), jnp.exp(other - new_max)
    added_weight = sums[split] * weight
    added = totals[split] * weight[:, None]
    return (
      new_max,
      total_weight * decay + added_weight,
      total * decay[:, None] + added,
    )

  _, total_weight, total = jax.lax.fori_loop(0, num_splits, add, carry)
  # A row that sees nothing gives zeros.
  return total / jnp.where(total_weight == 0, 1.0, total_weight)[:, None]
