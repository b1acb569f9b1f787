"""The parts of a decoder layer, as pure functions.

Legend: B rows, T tokens, E head_dim.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import norm, products
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import IRope, RopeScaling
from swiftspec_jax.models.matrices.int8_dynamic import Int8Matrix
from swiftspec_jax.models.matrices.quantization import QuantizedMatrix
from swiftspec_jax.models.matrices.stored_blocks import BlockMatrix
from swiftspec_jax.models.matrices.transposed import TransposedMatrix

# Weights that multiply themselves.
MATRICES = (QuantizedMatrix, Int8Matrix, TransposedMatrix, BlockMatrix)
# Of these, what tables may be, too: they look up rows and make scores.
TABLES = (Int8Matrix, BlockMatrix)

rms_norm = norm.rms_norm


def product(x: jax.Array, weight: Any) -> jax.Array:
  """Returns x [B, T, in] times a weight [in, ...]."""
  rows = x.reshape(-1, x.shape[-1])
  if isinstance(weight, MATRICES):
    found = weight.multiply(rows)
  else:
    found = products.multiply(rows, weight)
  return found.reshape(*x.shape[:2], *found.shape[1:])


def take_rows(table: Any, token_ids: jax.Array) -> jax.Array:
  """Returns the rows [B, T, D] of a table [V, D]."""
  if isinstance(table, TABLES):
    return table.take_rows(token_ids)
  return products.take_rows(table, token_ids)


def rope_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> jax.Array:
  """Returns f32[E / 2] radians for each position."""
  if scaling is not None and scaling.kind == 'dynamic':
    longest = 1 + scaling.factor * (scaling.factor - 1)
    theta *= longest ** (head_dim / (head_dim - 2))
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = theta**-exponents
  if scaling is None or scaling.kind == 'dynamic':
    return frequencies
  if scaling.kind == 'linear':
    return frequencies / scaling.factor
  if scaling.kind == 'longrope':
    return frequencies / jnp.asarray(scaling.divisors, jnp.float32)
  if scaling.kind == 'proportional':
    num_rotated = int(scaling.rotated_share * head_dim // 2)
    is_rotated = jnp.arange(head_dim // 2) < num_rotated
    return jnp.where(is_rotated, frequencies / scaling.factor, 0)
  # Long wavelengths are stretched, short ones kept, and those in between
  # blended.
  if scaling.kind == 'yarn':
    kept = _kept_by_yarn(head_dim, theta, scaling)
    return frequencies * (kept + (1 - kept) / scaling.factor)
  wavelengths = 2 * jnp.pi / frequencies
  blend = jnp.clip(
    (scaling.original_max_context / wavelengths - scaling.low_freq_factor)
    / (scaling.high_freq_factor - scaling.low_freq_factor),
    0,
    1,
  )
  return frequencies * (blend + (1 - blend) / scaling.factor)


def _kept_by_yarn(
  head_dim: int, theta: float, scaling: RopeScaling
) -> jax.Array:
  """Returns f32[E / 2], 1 where a frequency is kept and 0 where stretched."""

  def index_of(turns):
    wavelength = scaling.original_max_context / turns
    return head_dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(theta)

  first = index_of(scaling.high_freq_factor)
  last = index_of(scaling.low_freq_factor)
  if scaling.is_truncated:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, head_dim - 1)
  places = jnp.arange(head_dim // 2, dtype=jnp.float32)
  return 1 - jnp.clip((places - first) / max(last - first, 0.001), 0, 1)


def rope_angles(
  positions: jax.Array, config: ModelConfig, *, is_sliding: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns cos and sin, f32[B, T, E / 2], for one kind of layer.

  The attention factor multiplies both, so that queries and keys get it.
  """
  is_local = is_sliding and config.local_rope_theta is not None
  scaling = None if is_local else config.rope_scaling
  frequencies = rope_frequencies(
    config.head_dim,
    config.local_rope_theta if is_local else config.rope_theta,
    scaling,
  )
  angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None]
  factor = scaling.attention_factor if scaling else 1.0
  return factor * jnp.cos(angles), factor * jnp.sin(angles)


def query_factors(positions: jax.Array, irope: IRope) -> jax.Array:
  """Returns f32[B, T], factors of queries of layers without rotation."""
  steps = (positions + 1) // irope.floor_scale
  return 1 + irope.attn_scale * jnp.log1p(steps.astype(jnp.float32))


def window_ends(positions: jax.Array, config: ModelConfig) -> jax.Array:
  """Returns the last positions of the windows of tokens, of the same shape.

  A window ends at its token, a chunk where the next one begins.
  """
  if config.irope is None:
    return positions
  size = config.sliding_window
  return positions // size * size + size - 1


def cap(logits: jax.Array, bound: float | None) -> jax.Array:
  """Returns logits between -bound and bound; None leaves them as they are."""
  return logits if bound is None else bound * jnp.tanh(logits / bound)
