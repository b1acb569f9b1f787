"""Matrices of int8 and int4 for one CPU, whose native kernels multiply them.

Legend: P parts, K inputs, N outputs, C groups of inputs, B blocks of inputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels_pallas import dispatch
from kernels_pallas.few_rows import api
from kernels_pallas.gguf_blocks import native
from swiftspec_jax.models.matrices import quantization
from swiftspec_jax.models.matrices.int8_dynamic import Int8Matrix
from swiftspec_jax.models.matrices.quantization import QuantizedMatrix
from swiftspec_jax.models.matrices.stored_blocks import BlockMatrix
from swiftspec_jax.runtime import sharding as sharding_lib

_BLOCK_SIZE = 32
_DTYPE = np.dtype(np.float32)  # of rows that are looked up, which none is


def convert(
  matrix: QuantizedMatrix, mesh: Mesh
) -> QuantizedMatrix | Int8Matrix | BlockMatrix:
  """Returns a matrix as the native kernels take it, if these multiply it.

  Products with int8 round activations to 16 bits with a scale for each row,
  those with int4 to int8 with a scale for each 32. Scales and offsets of int4
  become float16.

  Args:
    matrix: matrix, abstract or not, of no experts.
    mesh: devices of the matrix.
  """
  kernels = api.usable_on(mesh, matrix.kernels)
  if kernels == dispatch.REFERENCE:
    return matrix
  values, scales, offsets = matrix.values, matrix.scales, matrix.offsets
  num_inputs, num_groups = values.shape[1], scales.shape[1]
  sharding = sharding_lib.replicated(mesh)
  if values.dtype == jnp.int8 and num_groups == 1 and offsets is None:
    program = functools.partial(_outputs_first, out_shape=matrix.out_shape)
    values, scales = quantization.run(program, [sharding] * 2, values, scales)
    return Int8Matrix(
      values=values, scales=scales, dtype=_DTYPE, num_terms=2, kernels=kernels
    )
  kind = 'Q4_0' if offsets is None else 'Q4_1'
  has_blocks = num_inputs % (num_groups * _BLOCK_SIZE) == 0
  if values.dtype != jnp.int4 or not has_blocks or not _has_library(kind):
    return matrix
  arrays = (values, scales) if offsets is None else (values, scales, offsets)
  return BlockMatrix(
    tensors=tuple(quantization.run(_to_blocks, [sharding], *arrays)),
    order=None,
    kinds=(kind,),
    starts=(0,),
    num_inputs=num_inputs,
    out_shape=matrix.out_shape,
    dtype=_DTYPE,
  )


def _has_library(kind: str) -> bool:
  try:
    native.check([kind])
  except NotImplementedError:
    return False  # the library has said why
  return True


@functools.partial(jax.jit, static_argnames='out_shape')
def _outputs_first(values, scales, out_shape):
  """Returns int8 [*A, K] and f32 [*A]."""
  values = jnp.swapaxes(values, 1, 2)
  return values.reshape(*out_shape, -1), scales.reshape(out_shape)


@jax.jit
def _to_blocks(values, scales, offsets=None):
  """Returns blocks of Q4_0, or of Q4_1 if there are offsets: u8[P x N x ...].

  A block has its float16 numbers, then the integers of its first half in the
  low bits of its bytes and those of its second half in the high ones.
  """
  num_blocks = values.shape[1] // _BLOCK_SIZE
  middle = quantization.MIDDLE

  def heads(array):  # u8[P, N, B, 2]
    array = jnp.repeat(array, num_blocks // array.shape[1], axis=1)
    array = jnp.swapaxes(array, 1, 2).astype(jnp.float16)
    return jax.lax.bitcast_convert_type(array, jnp.uint8)

  integers = (values.astype(jnp.int8) + middle).astype(jnp.uint8)
  halves = jnp.swapaxes(integers, 1, 2).reshape(
    len(values), -1, num_blocks, 2, _BLOCK_SIZE // 2
  )
  parts = [heads(scales), halves[..., 0, :] | halves[..., 1, :] << 4]
  if offsets is not None:
    parts.insert(1, heads(offsets - middle * scales))
  return [jnp.concatenate(parts, axis=-1).ravel()]
