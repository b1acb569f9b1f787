"""Matrices of experts stored in few bits with scales.

int8 has one scale for each output, int4 and float8 one for each output and
group of inputs. mxfp4 has a power of two for each output and 32 inputs (OCP
Microscaling Formats). int4 may have offsets besides, as in `quantization`.

Legend: X experts, K inputs, N outputs, C groups of inputs, R rows.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.grouped_matmul import api, tiles
from swiftspec_jax.models.matrices import quantization


@struct.dataclass(frozen=True, kw_only=True)
class QuantizedExperts:
  """The same matrix of all experts of a layer."""

  values: jax.Array  # int8, int4 or float8_e4m3fn [X, K, N]
  scales: jax.Array  # f32[X, C, N], or uint8 for MXFP4, see `float4`
  # f32[X, C, N], what is added to `values * scales`; None is nothing.
  offsets: jax.Array | None = None
  sharding: NamedSharding = struct.field(pytree_node=False)  # of values
  kernels: str = struct.field(pytree_node=False)  # as in ModelConfig

  def multiply(self, rows: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns the product of each row with its expert's matrix: [R, N].

    It is in the dtype of the rows, or in float32 where there are offsets.

    Args:
      rows: [R, K].
      chosen: i32[R] expert of each row, in ascending order.
    """
    # The chunks of a prompt are no work for a kernel of few rows.
    is_short = len(rows) <= tiles.MOST_ROWS
    product = api.grouped_matmul(
      rows,
      self.values,
      self.scales,
      chosen,
      implementation=self.kernels if is_short else dispatch.REFERENCE,
      sharding=self.sharding,
    )
    if self.offsets is None:
      return product
    return product.astype(jnp.float32) + self._offset_product(rows, chosen)

  def _offset_product(self, rows: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns rows [R, K] times the offsets of their experts: f32[R, N].

    As the inputs of a group have the same, that is a small product of the sums
    of rows over groups.
    """
    num_experts, num_groups, _ = self.offsets.shape
    groups = rows.astype(jnp.float32).reshape(len(rows), num_groups, -1)
    return jax.lax.ragged_dot(
      groups.sum(axis=-1),
      self.offsets,
      jnp.bincount(chosen, length=num_experts),
      precision=jax.lax.Precision.HIGHEST,
    )


class Scheme(quantization.Scheme):
  """How a parameter [X, K, N] becomes a QuantizedExperts."""

  def _split(self, sizes):
    return sizes[1:2], sizes[:1], sizes[2:]

  def matrices(self, array):
    return array

  def _matrix(self, shape, sharding, values, scales, offsets=None):
    return QuantizedExperts(
      values=values,
      scales=scales,
      offsets=offsets,
      sharding=sharding,
      kernels=self.kernels,
    )
