"""The functions that models call, with the arguments of `arg_specs`."""

import contextlib
import functools

import pytest

from kernels_pallas import registry
from kernels_pallas.swiglu import api as swiglu_api
from swiftspec_jax.runtime import sharding

_OF_WEIGHTS = ('quantized_matmul', 'grouped_matmul')


def _on_one_device(kernel, *arrays, **options):
  placed = sharding.sharding_of(sharding.make_mesh(), (None,) * 3)
  return registry.function(kernel, 'api')(*arrays, sharding=placed, **options)


def check_suits(spec, name, message, check, *arguments):
  """A kernel takes the shapes that it is said to suit, and refuses others."""
  refused = pytest.raises(NotImplementedError, match=message)
  with contextlib.nullcontext() if spec.suits(name) else refused:
    check(*arguments)


API_CALLS = {
  **{kernel: registry.function(kernel, 'api') for kernel in registry.PACKAGES},
  **{
    kernel: functools.partial(_on_one_device, kernel) for kernel in _OF_WEIGHTS
  },
  'swiglu': lambda x, *rest, **options: swiglu_api.swiglu(
    x[None], *rest, **options
  ),
}
