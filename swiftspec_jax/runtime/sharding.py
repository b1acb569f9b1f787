"""Meshes, and the rules that map logical array axes to mesh axes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)

from swiftspec_jax import errors

DATA_AXIS = 'data'
MODEL_AXIS = 'model'
SEQUENCE_AXIS = 'sequence'

# Logical axis -> mesh axes. Axes that are not named here are replicated. Heads
# and tokens share the devices in attention; other products have no tokens to
# share, so that all devices share their weights (Helix, arXiv 2507.07120).
RULES = {
  'batch': (DATA_AXIS,),
  'vocab': (MODEL_AXIS, SEQUENCE_AXIS),
  'outputs': (MODEL_AXIS, SEQUENCE_AXIS),
  'kv_heads': (MODEL_AXIS,),
  'kv_tokens': (SEQUENCE_AXIS,),
  'ffw': (MODEL_AXIS, SEQUENCE_AXIS),
  'expert_ffw': (MODEL_AXIS, SEQUENCE_AXIS),
  'kept_features': (MODEL_AXIS, SEQUENCE_AXIS),
}


def make_mesh(
  devices: Sequence[jax.Device] | None = None, sequence_devices: int = 1
) -> Mesh:
  """Returns a ('data', 'model') mesh: tensor parallel over all `devices`.

  The axes are of type Auto: the model code is the same on one device and on
  many, and the compiler places the collectives. An all-gather where a rule
  expects an all-reduce would show in the compiled text that the tests read.

  Args:
    devices: devices of the mesh; JAX's first one by default.
    sequence_devices: number of devices that share the tokens of the same kv
      heads. With more than one there is an axis 'sequence', after 'data'.

  Raises:
    UserError: no devices, or `sequence_devices` does not divide their number.
  """
  devices = jax.local_devices()[:1] if devices is None else devices
  if not devices:
    raise errors.UserError('a mesh needs at least one device, got none')
  if sequence_devices < 1 or len(devices) % sequence_devices:
    raise errors.UserError(
      f'sequence_devices={sequence_devices} does not divide the '
      f'{len(devices)} devices of the model'
    )
  sizes = {DATA_AXIS: 1, SEQUENCE_AXIS: sequence_devices, MODEL_AXIS: -1}
  if sequence_devices == 1:
    del sizes[SEQUENCE_AXIS]
  return Mesh(
    np.asarray(devices).reshape(*sizes.values()),
    tuple(sizes),
    axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
  )


def sequence_devices(mesh: Mesh) -> int:
  """Returns the number of devices that share the tokens of a sequence."""
  return mesh.shape.get(SEQUENCE_AXIS, 1)


def sharding_of(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
  """Returns the sharding of an array with the logical `axes`."""

  def mesh_axes(axis):
    names = tuple(name for name in RULES.get(axis, ()) if name in mesh.shape)
    return names if len(names) > 1 else next(iter(names), None)

  return NamedSharding(mesh, PartitionSpec(*map(mesh_axes, axes)))


def of_kept_features(mesh: Mesh, num_features: int) -> NamedSharding:
  """Returns the sharding of features [any, any, H] that a cache keeps.

  Devices share the H numbers of each token if these divide evenly.
  """
  is_shared = num_features % mesh.size == 0
  return sharding_of(mesh, (None, None, 'kept_features' if is_shared else None))


@functools.cache
def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def is_first_process() -> bool:
  """Whether this process writes files for all that work together."""
  return jax.process_index() == 0


def put(array: Any, sharding: NamedSharding) -> jax.Array:
  """Enqueues a copy of a host array to devices of any processes.

  Args:
    array: the same in all processes that have a part of the devices.
    sharding: devices and axes of the result.
  """
  if sharding.is_fully_addressable:
    return jax.device_put(array, sharding)
  # `device_put` would first have all processes compare their arrays.
  array = np.asarray(array)
  return jax.make_array_from_callback(
    array.shape, sharding, array.__getitem__, dtype=array.dtype
  )


def replicate(tree: Any, mesh: Mesh) -> Any:
  """Enqueues a copy of all arrays of `tree` to each device of `mesh`.

  Arrays on devices must be replicated there.
  """
  sharding = replicated(mesh)
  if jax.process_count() == 1:
    return jax.device_put(tree, sharding)

  def copy(x):
    if not (isinstance(x, jax.Array) and x.committed):
      return put(x, sharding)
    if x.sharding.is_equivalent_to(sharding, x.ndim):
      return x  # is there
    return _send(x, mesh)

  return jax.tree.map(copy, tree)


def argument(tree: Any, mesh: Mesh) -> Any:
  """Returns host arrays as a program on `mesh` takes them.

  Where one process has all devices, the call copies them in less of the host's
  time than `replicate`. They must not change afterwards.
  """
  return tree if jax.process_count() == 1 else replicate(tree, mesh)


def to_host(array: jax.Array, mesh: Mesh) -> np.ndarray:
  """Returns the array in processes of `mesh`, and something in the others.

  All processes that have a part of the array or the mesh must call it.
  """
  holders = _processes(array.sharding)
  readers = _processes(replicated(mesh))
  if len(holders) > 1:
    array = _whole(array, replicated(array.sharding.mesh))
  if readers - holders:
    array = everywhere(array)
  if jax.process_index() in readers:
    return np.asarray(array)
  return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def everywhere(tree: Any) -> Any:
  """Enqueues copies of replicated arrays to the host of every process.

  Returns:
    The arrays as `jax.device_get` can read them in this process.
  """
  if jax.process_count() > 1:
    tree = jax.tree.map(_readable, tree)
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.Array):
      leaf.copy_to_host_async()
  return tree


def _readable(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
  if isinstance(array, np.ndarray):
    return array
  readable = array
  holders = _processes(array.sharding)
  for process in range(jax.process_count()):
    if process not in holders:
      devices = jax.devices()
      first = next(x for x in devices if x.process_index == process)
      copy = _send(array, make_mesh([first]))
      if process == jax.process_index():
        readable = copy
  return readable


def _processes(sharding: Sharding) -> set[int]:
  return {device.process_index for device in sharding.device_set}


def _send(array: jax.Array, mesh: Mesh) -> jax.Array:
  """Enqueues a transfer from the first device to the first, and from there."""
  source = min(array.sharding.device_set, key=lambda device: device.id)
  first = mesh.devices.flat[0]
  parts = [x.data for x in array.addressable_shards if x.device == source]
  moved = _on_device(array, source, parts)
  if jax.process_index() in (source.process_index, first.process_index):
    moved = jax.device_put(moved, SingleDeviceSharding(first))
  else:
    moved = _on_device(array, first, [])
  sharding = replicated(mesh)
  if sharding.is_fully_addressable:
    return jax.device_put(moved, sharding)
  parts = {x.device: x.data[None] for x in moved.addressable_shards}
  stacked = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  for device in stacked.addressable_devices - parts.keys():
    parts[device] = jax.device_put(
      np.zeros((1, *array.shape), array.dtype), device
    )
  stacked = jax.make_array_from_single_device_arrays(
    (mesh.size, *array.shape), stacked, [*parts.values()], dtype=array.dtype
  )
  return _first(stacked, sharding)


def _on_device(
  like: jax.Array, device: jax.Device, parts: list[jax.Array]
) -> jax.Array:
  """Returns an array on one device; `parts` is empty in other processes."""
  return jax.make_array_from_single_device_arrays(
    like.shape, SingleDeviceSharding(device), parts, dtype=like.dtype
  )


@functools.partial(jax.jit, static_argnames='sharding')
def _first(stacked: jax.Array, sharding: NamedSharding) -> jax.Array:
  return jax.lax.with_sharding_constraint(stacked[0], sharding)


@functools.partial(jax.jit, static_argnames='sharding')
def _whole(array: jax.Array, sharding: NamedSharding) -> jax.Array:
  return jax.lax.with_sharding_constraint(array, sharding)
