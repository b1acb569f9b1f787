"""Parameters: the abstract tree, random ones, and placing them on a mesh.

`param_specs` declares each once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import array_parts
from swiftspec_jax.models.matrices import (
  native_matrices,
  stored_blocks,
  transposed,
)
from swiftspec_jax.models.matrices.quantization import QuantizedMatrix
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix
from swiftspec_jax.models.param_specs import ParamSpec, param_specs
from swiftspec_jax.runtime import sharding

Params = dict[str, Any]  # pytree of arrays and of matrices of other kinds


def abstract_params(
  config: ModelConfig, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> Params:
  """Returns the tree of jax.ShapeDtypeStruct, with shardings."""

  def abstract(spec: ParamSpec) -> Any:
    array = jax.ShapeDtypeStruct(
      spec.padded_shape,
      spec.dtype(dtype),
      sharding=sharding.sharding_of(mesh, spec.axes),
    )
    return _quantized(array, spec, mesh)

  return jax.tree.map(abstract, param_specs(config))


def _quantized(array, spec: ParamSpec, mesh: Mesh):
  """Returns the array as the parameter tree has it."""
  if spec.scheme is None:
    return array
  return _for_devices(spec.scheme.quantize(array, spec.axes, mesh), spec, mesh)


def _for_devices(matrix, spec: ParamSpec, mesh: Mesh):
  """Returns a matrix as devices multiply it fastest."""
  is_kept = not isinstance(matrix, QuantizedMatrix) or spec.scheme.is_experts
  return matrix if is_kept else native_matrices.convert(matrix, mesh)


def place_params(
  arrays: Params, specs: Params, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> Params:
  """Pads host arrays, converts and quantizes them, puts them on the mesh.

  Args:
    arrays: tree of numpy arrays with the unpadded shapes of `specs`, of
      `array_parts.Joined` ones, of matrices that are quantized already or in
      blocks, or of another model's padded arrays.
    specs: `param_specs` of the model, or a part of it; its config has the
      mesh's number of shards.
    dtype: dtype of the weights; norm scales stay float32.
    mesh: devices that they go to.

  Raises:
    UserError: an array's shape contradicts the config.
  """

  def place(path, spec: ParamSpec, array: Any) -> Any:
    if isinstance(array, StoredMatrix):
      placed = spec.scheme.place(array, spec.padded_shape, spec.axes, mesh)
      return _for_devices(placed, spec, mesh)
    if isinstance(array, stored_blocks.StoredBlocks):
      return array.place(dtype, mesh)
    if isinstance(array, jax.Array) and _is_placed(array, spec, dtype, mesh):
      return array
    if isinstance(array, jax.Array):
      array = sharding.to_host(array, mesh)[tuple(map(slice, spec.shape))]
    name = f'parameter {jax.tree_util.keystr(path)}'
    array_parts.check_shape(name, array.shape, spec.shape)
    # Only what the devices of this process need is read.
    read = functools.partial(
      array_parts.read, array, spec.padded_shape, spec.dtype(dtype)
    )
    is_matrix_as_it_is = spec.num_in_axes and spec.scheme is None
    if is_matrix_as_it_is and transposed.is_faster(spec.dtype(dtype), mesh):
      return transposed.place(read, spec, mesh, spec.dtype(dtype))
    placed = jax.make_array_from_callback(
      spec.padded_shape,
      sharding.sharding_of(mesh, spec.axes),
      read,
      dtype=spec.dtype(dtype),
    )
    return _quantized(placed, spec, mesh)

  return jax.tree_util.tree_map_with_path(place, specs, arrays)


def _is_placed(
  array: jax.Array,
  spec: ParamSpec,
  dtype: jax.typing.DTypeLike,
  mesh: Mesh,
) -> bool:
  """Whether another model's array can be shared as it lies."""
  return (
    spec.scheme is None
    and array.shape == spec.padded_shape
    and array.dtype == spec.dtype(dtype)
    and array.sharding == sharding.sharding_of(mesh, spec.axes)
  )


def absent(config: ModelConfig) -> tuple[Params, Params]:
  """Returns arrays for `place_params` on other processes, and their specs."""
  specs = param_specs(config)
  arrays = jax.tree.map(
    lambda spec: np.broadcast_to(np.zeros((), np.int8), spec.shape), specs
  )
  return arrays, specs


def random_params(
  key: jax.Array,
  config: ModelConfig,
  dtype: jax.typing.DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
) -> Params:
  """Returns random parameters; the same for any number of shards.

  Args:
    key: PRNG key, which is consumed.
    config: sizes of the model.
    dtype: dtype of the weights.
    mesh: devices that they go to; one device by default.
  """
  mesh = sharding.make_mesh() if mesh is None else mesh
  tree = param_specs(config)
  specs, treedef = jax.tree.flatten(tree)

  # By NumPy, as jax.random compiles a program for each shape.
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))

  def random(spec):
    if spec.is_index:
      return np.arange(*spec.shape, dtype=np.int32)
    if spec.is_norm:
      return np.ones(spec.shape, np.float32)
    return rng.standard_normal(spec.shape, np.float32) * spec.init_scale

  arrays = [random(spec) for spec in specs]
  return place_params(treedef.unflatten(arrays), tree, dtype, mesh)
