"""The functions that models call, with the arguments of `arg_specs`."""

from kernels_pallas import registry
from kernels_pallas.grouped_matmul import api as grouped_api
from kernels_pallas.quantized_matmul import api as quantized_api
from kernels_pallas.swiglu import api as swiglu_api
from swiftspec_jax import sharding

API_CALLS = {
  **{kernel: registry.function(kernel, 'api') for kernel in registry.PACKAGES},
  'quantized_matmul': lambda *arrays, **options: quantized_api.quantized_matmul(
    *arrays,
    sharding=sharding.sharding_of(sharding.make_mesh(), (None,) * 3),
    **options,
  ),
  'grouped_matmul': lambda *arrays, **options: grouped_api.grouped_matmul(
    *arrays,
    sharding=sharding.sharding_of(sharding.make_mesh(), (None,) * 3),
    **options,
  ),
  'swiglu': lambda x, *rest, **options: swiglu_api.swiglu(
    x[None], *rest, **options
  ),
}
