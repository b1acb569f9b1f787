"""Matrices in the blocks of a GGUF file, which is mapped, not read.

Legend: T rows, K inputs, M outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from kernels_pallas.gguf_blocks import native
from swiftspec_jax import errors
from swiftspec_jax.models.matrices.row_products import RowProducts
from swiftspec_jax.runtime import sharding as sharding_lib


@struct.dataclass(frozen=True, kw_only=True)
class BlockMatrix(RowProducts):
  """A matrix of one or several tensors with the same inputs."""

  tensors: tuple[jax.Array, ...]  # u8[start + M x bytes of a row]
  # i32[M] place in the tensors of each output; None where that is its own.
  order: jax.Array | None
  kinds: tuple[str, ...] = struct.field(pytree_node=False)
  starts: tuple[int, ...] = struct.field(pytree_node=False)
  num_inputs: int = struct.field(pytree_node=False)
  out_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of M
  dtype: np.dtype = struct.field(pytree_node=False)  # of its rows

  def _multiply(self, x, *norm, **options):
    found = native.multiply(
      x, self.tensors, self.kinds, self.starts, *norm, **options
    )
    *total, product = found if norm else [found]
    if options.get('activation') is None:
      if self.order is not None:
        product = product[:, self.order]
      product = product.reshape(-1, *self.out_shape)
    return (*total, product) if norm else product

  def take_rows(self, indices: jax.Array) -> jax.Array:
    """Returns the weights of outputs i32[...] of a table: [..., K]."""
    found = native.take_rows(
      self.tensors[0], indices, self.kinds[0], self.starts[0], self.num_inputs
    )
    return found.astype(self.dtype)

  def dequantized(self) -> jax.Array:
    """Returns a table f32[M, K]."""
    every = jnp.arange(self.out_shape[0], dtype=jnp.int32)
    return self.take_rows(every).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class StoredBlocks:
  """A matrix on the host.

  Attributes:
    tensors: `gguf_header.Tensor`s with the same inputs, whose outputs are one
      after the other.
    num_inputs: K.
    order: place in the tensors of each output, i32 with the axes of outputs.
  """

  tensors: Sequence[Any]  # its module needs a package that others do not
  num_inputs: int
  order: np.ndarray

  @property
  def shape(self) -> tuple[int, ...]:
    return *self.order.shape, self.num_inputs

  @classmethod
  def join(
    cls,
    join: Callable[[list[np.ndarray]], np.ndarray],
    matrices: Sequence['StoredBlocks'],
  ) -> 'StoredBlocks':
    """Returns matrices as one, with what `join` makes of their orders."""
    tensors, places, start = [], [], 0
    for matrix in matrices:
      tensors += matrix.tensors
      places.append(start + matrix.order)
      start += matrix.order.size
    return cls(tensors, matrices[0].num_inputs, join(places))

  def place(self, dtype: jax.typing.DTypeLike, mesh: Mesh) -> BlockMatrix:
    """Returns the matrix on a mesh of one CPU, without a copy of its blocks.

    Args:
      dtype: dtype of rows that are looked up.
      mesh: the CPU.
    """
    sharding = sharding_lib.replicated(mesh)
    put = functools.partial(jax.device_put, device=sharding)
    order = self.order.ravel()
    is_own = np.array_equal(order, np.arange(order.size))
    return BlockMatrix(
      tensors=tuple(put(tensor.aligned) for tensor in self.tensors),
      order=None if is_own else put(order),
      kinds=tuple(tensor.kind.name for tensor in self.tensors),
      starts=tuple(tensor.start for tensor in self.tensors),
      num_inputs=self.num_inputs,
      out_shape=self.order.shape,
      dtype=jnp.dtype(dtype),
    )


@dataclasses.dataclass(frozen=True)
class Scheme:
  """Stands for weights that only files have in blocks."""

  def quantize(self, *_) -> NoReturn:
    """Raises UserError: no blocks are made."""
    raise errors.UserError(
      "weight_dtype='stored' keeps the blocks of GGUF files, and these weights "
      'have none; leave out weight_dtype, or take int8_dynamic'
    )
