"""Product with a quantized weight, by what suits devices and shape.

Legend: T rows, P parts, K inputs, N outputs, C groups of inputs.
"""

import functools

import jax
from jax.sharding import NamedSharding

from kernels_pallas import dispatch, registry, trials, tuning
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
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`. What 'mosaic_gpu' cannot do is left to
      'pallas_gpu'.
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
    call = registry.function('quantized_matmul', chosen)
    call = functools.partial(call, activation=activation)
    return tuning.tuned('quantized_matmul', chosen, call, sharding)(*arrays)

  return shards.multiply(
    product, x, values, scales, sharding=sharding, result=(None, None)
  )


def _choose(x, values, scales, activation, implementation, sharding):
  """Returns the name of the implementation for a device's part."""
  described = (
    f'x {x.dtype}{list(x.shape)}, weight {values.dtype}{list(values.shape)}, '
    f'{scales.shape[1]} groups{f", {activation}" if activation else ""}'
  )
  num_parts, num_inputs, num_outputs = values.shape
  spec = arg_specs.ArgSpec(
    name=described,
    num_tokens=x.shape[0],
    num_parts=num_parts,
    num_inputs=num_inputs,
    num_outputs=num_outputs,
    group_size=num_inputs // scales.shape[1],
    dtype=x.dtype.name,
    weight_dtype=values.dtype.name,
    activation=activation,
  )
  checks = registry.checks('quantized_matmul', x, values, scales)
  if implementation == 'mosaic_gpu':
    try:
      checks['mosaic_gpu']()
    except NotImplementedError:
      del checks['mosaic_gpu']
  return dispatch.choose(
    'quantized_matmul',
    described,
    implementation,
    dispatch.platform_of(sharding),
    checks,
    trial=functools.partial(trials.verdict, 'quantized_matmul', spec, sharding),
  )
