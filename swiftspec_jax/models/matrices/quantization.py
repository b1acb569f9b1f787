"""Matrices stored in few bits with scales.

int8 has one scale for each output, int4 and float8 one for each output and
group of inputs. Only weights are quantized. What we quantize is symmetric: all
sums are those of `values * scales`. Published matrices of int4 have zero
points, too, which become an offset for each output and group. `int8_dynamic` is
where activations are quantized, too.

Legend: P parts, K inputs, N outputs, C groups of inputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.normed_matmul import api as normed_api
from kernels_pallas.normed_matmul import reference as normed_reference
from kernels_pallas.quantized_matmul import api, float4, tiles
from kernels_pallas.swiglu import reference as swiglu_reference
from swiftspec_jax import sharding as sharding_lib

# By `ModelConfig.weight_dtype`.
VALUE_DTYPES = {
  'int8': 'int8',
  'int4': 'int4',
  'float8': 'float8_e4m3fn',
  'mxfp4': 'int4',  # the bits of numbers, see `quantized_matmul.float4`
}
_HIGHEST_EXPONENT = 2  # of float4: its highest number is 6
MIDDLE = 8  # of the 16 integers of int4: what becomes zero
# qwix puts the highest weight right between the last integer and the one
# after it, where the last bit decides and compilers differ. So a bit lower.
_CALIBRATION = 'absmax,1.001'


@struct.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
  """A matrix in the order that kernels read.

  Parts are matrices of the same inputs, each sharded for itself: gate and up.
  """

  values: jax.Array  # int8, int4 or float8_e4m3fn [P, K, N]
  scales: jax.Array  # f32[P, C, N]
  # f32[P, C, N], what is added to `values * scales`; None is nothing.
  offsets: jax.Array | None = None
  out_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of P x N
  sharding: NamedSharding = struct.field(pytree_node=False)  # of values
  kernels: str = struct.field(pytree_node=False)  # as in ModelConfig

  def multiply(self, x: jax.Array) -> jax.Array:
    """Returns rows x [T, K] times the matrix: [T, *out_shape]."""
    product = self._product(x)
    if self.offsets is not None:
      total = product.astype(jnp.float32) + self._offset_product(x)
      product = total.astype(x.dtype)
    return product.reshape(-1, *self.out_shape)

  def multiply_gated(self, x: jax.Array, activation: str) -> jax.Array:
    """Returns act(x gate) * (x up) of rows x [T, K] and two parts: [T, N]."""
    if self.offsets is not None:
      gate, up = jnp.moveaxis(self.multiply(x), 1, 0)
      return swiglu_reference.gated_activation(gate, up, activation)
    return self._product(x, activation)[:, 0]

  def multiply_normed(
    self,
    x: jax.Array,
    added: jax.Array,
    norm_scale: jax.Array,
    epsilon: float,
    activation: str | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns x + added, and its norm times the matrix.

    Args:
      x: [T, K].
      added: [T, K].
      norm_scale: f32[K] scale of the norm.
      epsilon: number that is added to the mean square.
      activation: gate that joins two parts, or None.

    Returns:
      [T, K], and [T, *out_shape], or [T, N] with an activation.
    """
    if self.offsets is not None or len(x) > tiles.MOST_ROWS:
      total = x + added
      normed = normed_reference.rms_norm(total, norm_scale, epsilon)
      if activation:
        return total, self.multiply_gated(normed, activation)
      return total, self.multiply(normed)
    total, product = normed_api.normed_matmul(
      x,
      added,
      norm_scale,
      self.values,
      self.scales,
      epsilon=epsilon,
      activation=activation,
      implementation=self.kernels,
      sharding=self.sharding,
    )
    if activation:
      return total, product[:, 0]
    return total, product.reshape(-1, *self.out_shape)

  def _product(self, x, activation=None):
    # The chunks of a prompt are no work for a kernel of few rows.
    is_short = len(x) <= tiles.MOST_ROWS
    return api.quantized_matmul(
      x,
      self.values,
      self.scales,
      activation=activation,
      implementation=self.kernels if is_short else dispatch.REFERENCE,
      sharding=self.sharding,
    )

  def _offset_product(self, x: jax.Array) -> jax.Array:
    """Returns rows x [T, K] times the offsets of their inputs: f32[T, P, N].

    As the inputs of a group have the same, that is a small product of the sums
    of rows over groups.
    """
    groups = x.astype(jnp.float32).reshape(len(x), self.offsets.shape[1], -1)
    return jnp.einsum(
      'tc,pcn->tpn',
      groups.sum(axis=-1),
      self.offsets,
      precision=jax.lax.Precision.HIGHEST,
    )


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
  """A matrix as a checkpoint has it, on the host and without padding.

  Attributes:
    values: int8, int8 from -8 to 7 for int4 and the bits of MXFP4, or
      float8_e4m3fn [P, K, N]. Of a mixture of experts, the parts are experts.
    scales: f32[P, C, N], or the bits of MXFP4, uint8.
    offsets: f32[P, C, N]; None is nothing.
  """

  values: np.ndarray
  scales: np.ndarray
  offsets: np.ndarray | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @classmethod
  def join(
    cls,
    join: Callable[[list[np.ndarray]], np.ndarray],
    matrices: Sequence['StoredMatrix'],
  ) -> 'StoredMatrix':
    """Returns what `join` makes of each of the arrays of some matrices."""
    fields = zip(*(matrix._arrays for matrix in matrices), strict=True)
    return cls(*(x[0] if x[0] is None else join(x) for x in fields))

  def __getitem__(self, index) -> 'StoredMatrix':
    """Returns the matrix of some outputs, by an index `[..., outputs]`."""
    return StoredMatrix(*(x if x is None else x[index] for x in self._arrays))

  @property
  def _arrays(self):
    return self.values, self.scales, self.offsets

  def is_grouped(self, weight_dtype: str) -> bool:
    """Whether groups of inputs have scales of their own.

    Those of int4 always do, as its kernels have them.
    """
    return weight_dtype == 'int4' or self.scales.shape[1] > 1

  def put(
    self,
    shape: tuple[int, int],
    group_size: int | None,
    shardings: tuple[NamedSharding, NamedSharding],
    dtype: jax.typing.DTypeLike,
  ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns values, scales and offsets on devices, padded with zeros.

    Args:
      shape: K and N with padding.
      group_size: number of inputs that no group may have more of, as they may
        be those of two devices; None where all inputs share a scale.
      shardings: shardings of values, and of scales and offsets.
      dtype: dtype of the values.
    """
    num_inputs, num_outputs = shape
    stored_size = self.values.shape[1] // self.scales.shape[1]
    size = math.gcd(stored_size, group_size) if group_size else stored_size
    num_groups = num_inputs // size if group_size else 1

    def padded(array, num_rows, sharding):
      result = np.zeros((len(array), num_rows, num_outputs), array.dtype)
      result[:, : array.shape[1], : array.shape[2]] = array
      return sharding_lib.put(result, sharding)

    def groups(array):
      array = np.repeat(array, stored_size // size, axis=1)
      return padded(array, num_groups, shardings[1])

    has_offsets = self.offsets is not None and self.offsets.any()
    return (
      padded(self.values.astype(dtype), num_inputs, shardings[0]),
      groups(self.scales),
      groups(self.offsets) if has_offsets else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """How a parameter becomes a QuantizedMatrix.

  Attributes:
    weight_dtype: 'int8', 'int4', 'float8' or, of experts, 'mxfp4'.
    group_size: number of inputs that share a scale where int8 does not.
    kernels: name of the code to run, one of
      `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    num_in_axes: number of axes that are inputs, the first of the parameter.
    num_part_axes: number of axes that are parts, those after the inputs.
  """

  weight_dtype: str
  group_size: int
  kernels: str
  num_in_axes: int = 1
  num_part_axes: int = 0

  def quantize(
    self,
    array: jax.Array | jax.ShapeDtypeStruct,
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedMatrix:
    """Returns the matrix, whose numbers do not depend on the mesh.

    Args:
      array: parameter on the mesh; if it is abstract, so is the matrix.
      axes: logical names of its axes. At most one is sharded: the first input,
        or the first output after the parts.
      mesh: devices of the matrix.
    """
    shardings = self._shardings(axes, mesh, self.weight_dtype != 'int8')
    values, scales = run(_program(self, shardings), array, shardings)
    return self._matrix(array.shape, shardings[0], values, scales)

  def place(
    self,
    stored: StoredMatrix,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    mesh: Mesh,
  ) -> QuantizedMatrix:
    """Returns the matrix of a checkpoint on a mesh.

    Args:
      stored: matrix of this kind.
      shape: sizes of the axes of the parameter, with padding.
      axes: logical names of these axes.
      mesh: devices of the matrix.
    """
    inputs, _, outputs = self._split(shape)
    is_grouped = stored.is_grouped(self.weight_dtype)
    shardings = self._shardings(axes, mesh, is_grouped)
    arrays = stored.put(
      (math.prod(inputs), math.prod(outputs)),
      self.group_size if is_grouped else None,
      shardings,
      VALUE_DTYPES[self.weight_dtype],
    )
    return self._matrix(shape, shardings[0], *arrays)

  def _split(self, sizes: tuple) -> tuple[tuple, tuple, tuple]:
    """Returns what axes of inputs, parts and outputs have."""
    parts, outputs = self.num_in_axes, self.num_in_axes + self.num_part_axes
    return sizes[:parts], sizes[parts:outputs], sizes[outputs:]

  def matrices(self, array: jax.Array) -> jax.Array:
    """Returns a parameter as [P, K, N]."""
    inputs, parts, _ = map(math.prod, self._split(array.shape))
    return jnp.moveaxis(array.reshape(inputs, parts, -1), 1, 0)

  def _matrix(self, shape, sharding, values, scales, offsets=None):
    return QuantizedMatrix(
      values=values,
      scales=scales,
      offsets=offsets,
      out_shape=shape[self.num_in_axes :],
      sharding=sharding,
      kernels=self.kernels,
    )

  def _shardings(
    self, axes: tuple[str | None, ...], mesh: Mesh, is_grouped: bool
  ) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of values and of scales."""
    (inputs, *_), _, (outputs, *_) = self._split(axes)
    values, scales = (
      sharding_lib.sharding_of(mesh, (None, axis, outputs))
      for axis in (inputs, inputs if is_grouped else None)
    )
    return values, scales


@functools.cache
def _program(scheme: Scheme, shardings: tuple[NamedSharding, ...]):
  """Returns what makes values and scales of an array."""

  def quantize(array):
    matrices = scheme.matrices(array.astype(jnp.float32))
    if scheme.weight_dtype == 'mxfp4':
      return _to_mxfp4(matrices, scheme.group_size)
    tiled = {1: scheme.group_size} if scheme.weight_dtype != 'int8' else {}
    dtype = VALUE_DTYPES[scheme.weight_dtype]
    return round_weights(matrices, dtype, (0, 2), tiled)

  return jax.jit(quantize, out_shardings=shardings)


def _to_mxfp4(array: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """Returns bits int4 and uint8, as section 6.3 of OCP has them."""
  num_parts, _, num_outputs = array.shape
  groups = array.reshape(num_parts, -1, size, num_outputs)
  highest = jnp.abs(groups).max(axis=2, keepdims=True)
  _, exponents = jnp.frexp(highest)  # of a fraction below 1
  scales = jnp.ldexp(jnp.ones_like(highest), exponents - 1 - _HIGHEST_EXPONENT)
  values = jnp.clip(groups / scales, -6, 6).astype(jnp.float4_e2m1fn)
  return (
    float4.bits(values.astype(jnp.float32)).reshape(array.shape),
    float4.bits_of_scales(scales[:, :, 0]),
  )


def round_weights(
  array: jax.Array,
  dtype: str,
  channelwise_axes: tuple[int, ...],
  tiled_axes: Mapping[int, int],
) -> tuple[jax.Array, jax.Array]:
  """Returns numbers and scales f32 of an array f32, as qwix has them."""
  # Here, as it takes long to import and few programs need it.
  import qwix

  quantized = qwix.quantize(
    array,
    dtype,
    channelwise_axes=channelwise_axes,
    tiled_axes=tiled_axes,
    calibration_method=_CALIBRATION,
  )
  return quantized.qvalue, quantized.scale


def run(
  program: Callable[..., Sequence[jax.Array]],
  array: jax.Array | jax.ShapeDtypeStruct,
  shardings: Sequence[NamedSharding],
) -> Sequence[jax.Array | jax.ShapeDtypeStruct]:
  """Returns what a program makes of an array, abstract if the array is."""
  if not isinstance(array, jax.ShapeDtypeStruct):
    return program(array)
  return [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for x, sharding in zip(
      jax.eval_shape(program, array), shardings, strict=True
    )
  ]
