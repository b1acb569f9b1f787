"""Matrices of int8 whose products round the activations to int8, too.

A weight has one scale for each output, activations one for each row, found
while the model runs: what others call W8A8 with dynamic activations.

Legend: T rows, K inputs, A axes of outputs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import products
from kernels_pallas.few_rows import api
from swiftspec_jax.models.matrices import quantization
from swiftspec_jax.models.matrices.row_products import RowProducts
from swiftspec_jax.runtime import sharding as sharding_lib


@struct.dataclass(frozen=True, kw_only=True)
class Int8Matrix(RowProducts):
  """A matrix with the inputs of each output side by side."""

  values: jax.Array  # int8 [*A, K]
  scales: jax.Array  # f32 [*A]
  dtype: np.dtype = struct.field(pytree_node=False)  # before, and of its rows
  # Integers for each activation, see `int8_products.quantize_rows`.
  num_terms: int = struct.field(pytree_node=False)
  kernels: str = struct.field(pytree_node=False)  # of `few_rows`

  def _multiply(self, x, *norm, **options):
    return api.few_rows(
      x,
      self.values,
      self.scales,
      *norm,
      num_terms=self.num_terms,
      implementation=self.kernels,
      **options,
    )

  def take_rows(self, indices: jax.Array) -> jax.Array:
    """Returns the weights of outputs i32[...] of a table: [..., K]."""
    values = products.take_rows(self.values, indices)
    scales = products.take_rows(self.scales[:, None], indices)
    return (values.astype(jnp.float32) * scales).astype(self.dtype)

  def dequantized(self) -> jax.Array:
    """Returns the matrix f32 [*A, K]."""
    return self.values.astype(jnp.float32) * self.scales[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """How a parameter becomes an Int8Matrix.

  Attributes:
    in_axes: axes of the parameter that are inputs, one after the other.
    num_terms: integers for each activation, see `Int8Matrix`.
    kernels: name of the code to run, one of
      `kernels_pallas.dispatch.IMPLEMENTATIONS`.
  """

  in_axes: tuple[int, ...]
  num_terms: int = 1
  kernels: str = 'auto'

  def quantize(
    self,
    array: jax.Array | jax.ShapeDtypeStruct,
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> Int8Matrix:
    """Returns the matrix; see `quantization.Scheme.quantize`."""
    outputs = [axis for i, axis in enumerate(axes) if i not in self.in_axes]
    shardings = tuple(
      sharding_lib.sharding_of(mesh, (*outputs, *inputs))
      for inputs in ((axes[self.in_axes[0]],), ())
    )
    program = _program(self.in_axes, shardings)
    values, scales = quantization.run(program, shardings, array)
    return Int8Matrix(
      values=values,
      scales=scales,
      dtype=array.dtype,
      num_terms=self.num_terms,
      kernels=api.usable_on(mesh, self.kernels),
    )


@functools.cache
def _program(in_axes: tuple[int, ...], shardings: tuple[NamedSharding, ...]):
  """Returns what makes values and scales of an array."""

  def quantize(array):
    last = range(-len(in_axes), 0)
    array = jnp.moveaxis(array.astype(jnp.float32), in_axes, last)
    outputs = array.shape[: -len(in_axes)]
    values, scales = quantization.round_weights(
      array.reshape(*outputs, -1), 'int8', tuple(range(len(outputs))), {}
    )
    return values, scales[..., 0]

  return jax.jit(quantize, out_shardings=shardings)
