"""Meshes, and the rules that map logical array axes to mesh axes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftspec_jax import errors

DATA_AXIS = 'data'
MODEL_AXIS = 'model'

# Logical axis -> mesh axis. Axes that are not named here are replicated.
RULES = {
  'batch': DATA_AXIS,
  'vocab': MODEL_AXIS,
  'outputs': MODEL_AXIS,
  'kv_heads': MODEL_AXIS,
  'ffw': MODEL_AXIS,
  'expert_ffw': MODEL_AXIS,
}


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Returns a ('data', 'model') mesh: tensor parallel over all `devices`.

  The axes are of type Auto: the model code is the same on one device and on
  many, and the compiler places the collectives. An all-gather where a rule
  expects an all-reduce would show in the compiled text that the tests read.
  """
  devices = jax.local_devices()[:1] if devices is None else devices
  if not devices:
    raise errors.UserError('a mesh needs at least one device, got none')
  return Mesh(
    np.asarray(devices).reshape(1, -1),
    (DATA_AXIS, MODEL_AXIS),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )


def sharding_of(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
  """Returns the sharding of an array with the logical `axes`."""
  return NamedSharding(mesh, PartitionSpec(*(RULES.get(a) for a in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def is_first_process() -> bool:
  """Whether this process writes files for all that work together."""
  return jax.process_index() == 0


def replicate(tree: Any, mesh: Mesh) -> Any:
  """Enqueues a copy of all arrays of `tree` to each device of `mesh`."""
  return jax.device_put(tree, replicated(mesh))
