"""Matrices of experts stored as int8, with a scale for each output of each.

A product first widens all experts of its matrix. So int8 saves memory here, but
no time.

Legend: X experts, K inputs, N outputs, R rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.models import quantization


@struct.dataclass(frozen=True, kw_only=True)
class Int8Experts:
  """The same matrix of all experts of a layer."""

  values: jax.Array  # int8[X, K, N]
  scales: jax.Array  # f32[X, N]

  def multiply(
    self, rows: jax.Array, sizes: jax.Array, chosen: jax.Array
  ) -> jax.Array:
    """Returns the product of each row with its expert's matrix: f32[R, N].

    Args:
      rows: [R, K], those of one expert side by side.
      sizes: i32[X] rows of each expert.
      chosen: i32[R] expert of each row.
    """
    product = jax.lax.ragged_dot(
      rows,
      self.values.astype(rows.dtype),
      sizes,
      preferred_element_type=jnp.float32,
    )
    return product * self.scales[chosen]


@dataclasses.dataclass(frozen=True)
class Scheme:
  """How a parameter [X, K, N] becomes an Int8Experts."""

  def quantize(
    self,
    array: jax.Array | jax.ShapeDtypeStruct,
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> Int8Experts:
    """Returns the matrix; see `quantization.Scheme.quantize`."""
    experts, _, outputs = axes
    shardings = tuple(
      sharding_lib.sharding_of(mesh, names)
      for names in (axes, (experts, outputs))
    )
    values, scales = quantization.run(_program(shardings), array, shardings)
    return Int8Experts(values=values, scales=scales)


@functools.cache
def _program(shardings: tuple[NamedSharding, ...]):
  """Returns what makes values and scales of an array."""

  def quantize(array):
    values, scales = quantization.round_weights(
      array.astype(jnp.float32), 'int8', (0, 2), {}
    )
    return values, scales[:, 0]

  return jax.jit(quantize, out_shardings=shardings)
