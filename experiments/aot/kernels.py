"""Every kernel at every shape of its `arg_specs`."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.aot.rows import Job
from experiments.aot.targets import Target
from kernels_pallas import dispatch
from kernels_pallas.kv_commit import arg_specs as commit_specs
from kernels_pallas.kv_commit import pallas_gpu as commit_gpu
from kernels_pallas.kv_commit import pallas_tpu as commit_tpu
from kernels_pallas.matmul_all_reduce import api as shared_api
from kernels_pallas.matmul_all_reduce import arg_specs as shared_specs
from kernels_pallas.quantized_matmul import arg_specs as quantized_specs
from kernels_pallas.quantized_matmul import pallas_gpu as quantized_gpu
from kernels_pallas.quantized_matmul import pallas_tpu as quantized_tpu
from kernels_pallas.rejection import arg_specs as rejection_specs
from kernels_pallas.rejection import pallas_gpu as rejection_gpu
from kernels_pallas.rejection import pallas_tpu as rejection_tpu
from kernels_pallas.swiglu import arg_specs as swiglu_specs
from kernels_pallas.swiglu import pallas_gpu as swiglu_gpu
from kernels_pallas.swiglu import pallas_tpu as swiglu_tpu
from kernels_pallas.thresholds import arg_specs as threshold_specs
from kernels_pallas.thresholds import pallas_gpu as threshold_gpu
from kernels_pallas.thresholds import pallas_tpu as threshold_tpu
from kernels_pallas.tree_attention import arg_specs as attention_specs
from kernels_pallas.tree_attention import mosaic_gpu as attention_mosaic
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
      'mosaic_gpu': attention_mosaic.tree_attention,
    },
  ),
  'verify_tree': (
    verification_specs.arg_specs(),
    {
      'pallas_tpu': verification_tpu.verify_tree,
      'pallas_gpu': verification_gpu.verify_tree,
    },
  ),
  'accept_chain': (
    rejection_specs.arg_specs(),
    {
      'pallas_tpu': rejection_tpu.accept_chain,
      'pallas_gpu': rejection_gpu.accept_chain,
    },
  ),
  'find_thresholds': (
    threshold_specs.arg_specs(),
    {
      'pallas_tpu': threshold_tpu.find_thresholds,
      'pallas_gpu': threshold_gpu.find_thresholds,
    },
  ),
  'swiglu': (
    swiglu_specs.arg_specs(),
    {
      'pallas_tpu': swiglu_tpu.swiglu,
      'pallas_gpu': swiglu_gpu.swiglu,
    },
  ),
  'kv_commit': (
    commit_specs.arg_specs(),
    {
      'pallas_tpu': commit_tpu.kv_commit,
      'pallas_gpu': commit_gpu.kv_commit,
    },
  ),
}


def takes(implementation: str, spec: Any) -> bool:
  """Whether a kernel is made for the dtype of a shape."""
  # wgmma multiplies no float32.
  return implementation != 'mosaic_gpu' or spec.dtype != 'float32'


def jobs(target: Target, every: int = 1) -> Iterator[Job]:
  """Yields the kernels of a target at each `every`-th shape."""
  for kernel, (specs, backends) in KERNELS.items():
    for backend in dispatch.implementations_of(target.platform):
      is_mosaic = backend == 'mosaic_gpu'
      for spec in specs[::every] if backend in backends else ():
        if takes(backend, spec):
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
