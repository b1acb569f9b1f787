"""Every kernel at every shape of its `arg_specs`."""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.aot.rows import Job
from experiments.aot.targets import Target
from kernels_pallas import dispatch, registry
from kernels_pallas.matmul_all_reduce import api as shared_api
from kernels_pallas.matmul_all_reduce import arg_specs as shared_specs

# By name, the shapes and the implementations.
KERNELS = {
  kernel: (
    registry.module(kernel, 'arg_specs').arg_specs(),
    {
      name: registry.function(kernel, name)
      for name in registry.implementations(kernel)
    },
  )
  for kernel in registry.PACKAGES
}


def jobs(target: Target, every: int = 1) -> Iterator[Job]:
  """Yields the kernels of a target at each `every`-th shape."""
  for kernel, (specs, backends) in KERNELS.items():
    for backend in dispatch.implementations_of(target.platform):
      is_mosaic = backend == 'mosaic_gpu'
      for spec in specs[::every] if backend in backends else ():
        if spec.suits(backend):
          yield Job(
            name=f'{kernel} mosaic' if is_mosaic else kernel,
            shape=spec.name,
            target=target,
            lower=functools.partial(_lower, backends[backend], spec, target),
          )
  for spec in shared_specs.arg_specs()[::every]:
    yield Job(
      name='matmul_all_reduce',
      shape=spec.name,
      target=target,
      lower=functools.partial(_lower_shared, spec, target),
    )


def _lower(kernel_fn, spec, target):
  mesh = Mesh(np.asarray(target.devices[:1]), ('model',))
  on_device = NamedSharding(mesh, PartitionSpec())
  program = jax.jit(
    functools.partial(kernel_fn, **spec.options()),
    in_shardings=on_device,
    out_shardings=on_device,
  )
  return program.lower(*spec.arrays())


def _lower_shared(spec, target):
  devices = np.asarray(target.devices[: spec.num_devices])
  mesh = Mesh(devices.reshape(1, -1), ('data', 'model'))
  everywhere = NamedSharding(mesh, PartitionSpec())
  by_inputs = NamedSharding(mesh, PartitionSpec('model'))
  on_tpu = target.platform == 'tpu'
  program = jax.jit(
    functools.partial(
      shared_api.matmul_all_reduce,
      implementation='pallas_tpu' if on_tpu else 'mosaic_gpu',
      sharding=by_inputs,
    ),
    in_shardings=(everywhere, by_inputs),
    out_shardings=everywhere,
  )
  return program.lower(*spec.arrays())
