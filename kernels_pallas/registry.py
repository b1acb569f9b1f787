"""The kernels, each with the package that holds all about it.

In a package the modules have these names, and the functions the kernel's:

  reference: the function in plain JAX, and its TOLERANCES
  arg_specs: `arg_specs()`, a `CallSpec` for each shape of real models
  api: the function that models call, which chooses among the others
  pallas_tpu, pallas_gpu, mosaic_gpu: those that there are, with `check`, which
    raises NotImplementedError, and `Config`, the tiles
  native: the same for CPUs, in front of a library of `native`; it has no tiles
"""

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kernels_pallas import dispatch

PACKAGES = {
  'few_rows': 'kernels_pallas.few_rows',
  'quantized_matmul': 'kernels_pallas.quantized_matmul',
  'grouped_matmul': 'kernels_pallas.grouped_matmul',
  'tree_attention': 'kernels_pallas.tree_attention',
  'fused_attention': 'kernels_pallas.fused_attention',
  'paged_attention': 'kernels_pallas.paged_attention',
  'fused_paged_attention': 'kernels_pallas.fused_paged_attention',
  'verify_tree': 'kernels_pallas.verification',
  'find_thresholds': 'kernels_pallas.thresholds',
  'swiglu': 'kernels_pallas.swiglu',
  'kv_commit': 'kernels_pallas.kv_commit',
  'paged_commit': 'kernels_pallas.paged_commit',
}


def module(kernel: str, name: str) -> ModuleType:
  """Returns a module of a kernel's package."""
  return importlib.import_module(f'{PACKAGES[kernel]}.{name}')


def function(kernel: str, name: str) -> Callable[..., Any]:
  """Returns the kernel's function in a module of its package."""
  return getattr(module(kernel, name), kernel)


@functools.cache
def implementations(kernel: str) -> tuple[str, ...]:
  """Returns the implementations of a kernel, without the reference."""
  return tuple(
    name
    for name in dispatch.IMPLEMENTATIONS
    if name != dispatch.REFERENCE
    and importlib.util.find_spec(f'{PACKAGES[kernel]}.{name}')
  )


def checks(kernel: str, *arguments: Any) -> dict[str, Callable[[], None]]:
  """Returns the `check` of each implementation, for `dispatch.choose`.

  A module is imported by its check: what those for GPUs and TPUs import takes a
  second, and most of them are not chosen.
  """

  def check(name):
    module(kernel, name).check(*arguments)

  return {
    name: functools.partial(check, name) for name in implementations(kernel)
  }
