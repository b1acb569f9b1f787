"""Every kernel at every shape of its `arg_specs`."""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.aot.rows import Job
from experiments.aot.targets import Target
from kernels_pallas import dispatch
from kernels_pallas.quantized_matmul import arg_specs as quantized_specs
from kernels_pallas.quantized_matmul import pallas_gpu as quantized_gpu
from kernels_pallas.quantized_matmul import pallas_tpu as quantized_tpu
from kernels_pallas.tree_attention import arg_specs as attention_specs
from kernels_pallas.tree_attention import pallas_gpu as attention_gpu
from kernels_pallas.tree_attention import pallas_tpu as attention_tpu
from kernels_pallas.verification import arg_specs as verification_specs
from kernels_pallas.verification import pallas_gpu as verification_gpu
from kernels_pallas.verification import pallas_tpu as verification_tpu

KERNELS = {
  'quantized_matmul': (
    quantized_specs.arg_specs(),
    {
      'pallas_tpu': quantized_tpu.quantized_matmul,
      'pallas_gpu': quantized_gpu.quantized_matmul,
    },
  ),
  'tree_attention': (
    attention_specs.arg_specs(),
    {
      'pallas_tpu': attention_tpu.tree_attention,
      'pallas_gpu': attention_gpu.tree_attention,
    },
  ),
  'verify_tree': (
    verification_specs.arg_specs(),
    {
      'pallas_tpu': verification_tpu.verify_tree,
      'pallas_gpu': verification_gpu.verify_tree,
    },
  ),
}


def jobs(target: Target, every: int = 1) -> Iterator[Job]:
  """Yields the kernels of a target at each `every`-th shape."""
  backend = dispatch.implementation_of(target.platform)
  for kernel, (specs, backends) in KERNELS.items():
    for spec in specs[::every]:
      yield Job(
        name=kernel,
        shape=spec.name,
        target=target,
        lower=functools.partial(_lower, backends[backend], spec, target),
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
