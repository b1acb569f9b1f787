"""Product with a quantized weight, by what suits devices and shape.

Legend: T rows, P parts, K inputs, N outputs, C groups of inputs.
"""

import jax
from jax.sharding import NamedSharding

from kernels_pallas import calls, registry
from kernels_pallas.quantized_matmul import arg_specs, shards


def quantized_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *,
  activation: str | None = None,
  implementation: str = 'auto',
  sharding: NamedSharding,
) -> jax.Array:
  """Multiplies rows with the weight `values * scales`.

  Args:
    x: [T, K] bfloat16 or float32.
    values: int8, int4 or float8_e4m3fn [P, K, N]. The P parts multiply the
      same rows, as gate and up do.
    scales: f32[P, C, N], one for each output and group of K / C successive
      inputs.
    activation: gate that joins two parts, gate and up: one of
      `swiglu.reference.ACTIVATIONS`. None leaves the parts as they are.
    implementation: one of `dispatch.IMPLEMENTATIONS`. What 'mosaic_gpu' cannot
      do is left to 'pallas_gpu'.
    sharding: sharding of `values`, of whose last two axes one may be sharded.
      The C groups are sharded with the inputs, unless there is only one.

  Returns:
    [T, P, N] with the dtype of x, summed in float32 on each device; [T, 1, N]
    with an activation, whose inputs are not sharded.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """

  def product(*arrays):
    chosen = _choose(*arrays, activation, implementation, sharding)
    options = {'activation': activation}
    call = calls.function('quantized_matmul', chosen, options, sharding)
    return call(*arrays)

  return shards.multiply(
    product, x, values, scales, sharding=sharding, result=(None, None)
  )


def _choose(x, values, scales, activation, implementation, sharding):
  """Returns the name of the implementation for a device's part."""
  arrays = x, values, scales
  spec = arg_specs.ArgSpec.of_call(*arrays, activation=activation)
  if implementation == 'mosaic_gpu':
    try:
      registry.checks('quantized_matmul', *arrays)['mosaic_gpu']()
    except NotImplementedError:
      implementation = 'pallas_gpu'
  return calls.choose(
    'quantized_matmul', spec, implementation, sharding, *arrays
  )
