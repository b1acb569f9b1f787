"""The functions that models call, with the arguments of `arg_specs`."""

import functools

from kernels_pallas import registry
from kernels_pallas.paged_attention import api as paged_api
from kernels_pallas.swiglu import api as swiglu_api
from swiftspec_jax import sharding

_OF_WEIGHTS = ('quantized_matmul', 'normed_matmul', 'grouped_matmul')


def _on_one_device(kernel, *arrays, **options):
  placed = sharding.sharding_of(sharding.make_mesh(), (None,) * 3)
  return registry.function(kernel, 'api')(*arrays, sharding=placed, **options)


def _paged_attention(*arrays, with_sums, **options):
  assert not with_sums  # the sharding says it
  return paged_api.paged_attention(*arrays, **options)


API_CALLS = {
  **{kernel: registry.function(kernel, 'api') for kernel in registry.PACKAGES},
  **{
    kernel: functools.partial(_on_one_device, kernel) for kernel in _OF_WEIGHTS
  },
  'paged_attention': _paged_attention,
  'swiglu': lambda x, *rest, **options: swiglu_api.swiglu(
    x[None], *rest, **options
  ),
}
