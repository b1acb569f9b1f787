"""Product and all-reduce by the implementation that suits the devices.

Legend: B rows, T tokens, K inputs, D outputs.
"""

import importlib
import math

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import dispatch
from kernels_pallas.matmul_all_reduce import reference


def matmul_all_reduce(
  x: jax.Array,
  weight: jax.Array,
  *,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> jax.Array:
  """Returns x [B, T, K] times a weight that devices share by inputs.

  Args:
    x: [B, T, K], bfloat16 or float32 for kernels.
    weight: [..., D] of the same dtype. Its other axes are the K inputs.
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`. 'auto' takes the reference: a wrong exchange
      can hang, and these kernels have not been run on devices. 'pallas_gpu'
      takes it, too, as there is no such kernel.
    sharding: sharding of the weight, whose first axis alone may be sharded.
      None means JAX's default device.

  Returns:
    [B, T, D], the same on all devices.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  if sharding is None or math.prod(sharding.mesh.devices.shape) == 1:
    return reference.matmul_all_reduce(x, weight)
  axis = sharding.spec[0]
  num_devices = math.prod(sharding.mesh.shape[name] for name in _axes(sharding))
  rows = (x.shape[0] * x.shape[1], x.shape[2] // num_devices)
  chosen = _choose(x, rows, weight, num_devices, implementation, sharding)
  if chosen == dispatch.REFERENCE:
    return reference.matmul_all_reduce(x, weight)

  def call(x, weight):
    x, weight = x.reshape(rows), weight.reshape(rows[1], -1)
    if chosen == 'mosaic_gpu':
      options = {'axis_names': sharding.mesh.axis_names}
    else:
      options = {'axis_name': axis, 'num_devices': num_devices}
    return _module(chosen).matmul_all_reduce(x, weight, **options)

  summed = jax.shard_map(
    call,
    mesh=sharding.mesh,
    in_specs=(P(None, None, axis), P(axis)),
    out_specs=P(),
    check_vma=False,
  )(x, weight)
  return summed.reshape(*x.shape[:2], -1)


def _axes(sharding):
  """Returns the axes of the mesh along which the inputs are shared."""
  axes = sharding.spec[0]
  return axes if isinstance(axes, tuple) else (axes,)


def _module(name):
  """Imports an implementation when it is wanted, as that takes a second."""
  return importlib.import_module(f'{__package__}.{name}')


def _choose(x, rows, weight, num_devices, implementation, sharding):
  """Returns the name of the implementation."""

  def check_axes():
    if len(_axes(sharding)) > 1:
      raise NotImplementedError('it adds up along one axis of the mesh')

  def check_tpu():
    if implementation == 'auto':
      raise NotImplementedError('it has not been run on devices; ask for it')
    check_axes()
    part = jax.ShapeDtypeStruct(rows, x.dtype)
    _module('pallas_tpu').check(part, weight.shape[-1], num_devices)

  def no_triton():
    raise NotImplementedError(
      'there is none, and mosaic_gpu has not been run on devices; ask for it'
    )

  def check_mosaic():
    check_axes()
    _module('mosaic_gpu').check(sharding.mesh.size, num_devices)

  return dispatch.choose(
    'matmul_all_reduce',
    f'x {x.dtype}{list(rows)}, {weight.shape[-1]} outputs, '
    f'{num_devices} devices',
    'auto' if implementation == 'pallas_gpu' else implementation,
    dispatch.platform_of(sharding),
    {
      'pallas_tpu': check_tpu,
      'pallas_gpu': no_triton,
      'mosaic_gpu': check_mosaic,
    },
  )
