"""Product of rows with quantized weights of their experts, by what suits.

Legend: R rows, X experts, K inputs, N outputs, C groups of inputs.
"""

import jax
from jax.sharding import NamedSharding

from kernels_pallas import calls
from kernels_pallas.grouped_matmul import arg_specs
from kernels_pallas.quantized_matmul import float4, shards


def grouped_matmul(
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  chosen: jax.Array,
  *,
  implementation: str = 'auto',
  sharding: NamedSharding,
) -> jax.Array:
  """Multiplies each row with the weight `values * scales` of its expert.

  Args:
    x: [R, K] bfloat16 or float32.
    values: int8, int4 or float8_e4m3fn [X, K, N].
    scales: f32[X, C, N], one for each output and group of K / C successive
      inputs; uint8 for MXFP4, whose numbers are bits in int4, see
      `quantized_matmul.float4`.
    chosen: i32[R] expert of each row, in ascending order.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of `values`, of whose last two axes one may be sharded.
      The C groups are sharded with the inputs, unless there is only one.

  Returns:
    [R, N] with the dtype of x, summed in float32 on each device.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """

  def product(*arrays):
    backend = _choose(*arrays[:3], implementation, sharding)
    return calls.function('grouped_matmul', backend, {}, sharding)(*arrays)

  return shards.multiply(
    product, x, values, scales, chosen, sharding=sharding, result=(None,)
  )


def _choose(x, values, scales, implementation, sharding):
  """Returns the name of the implementation for a device's part."""
  num_experts, num_inputs, num_outputs = values.shape
  spec = arg_specs.ArgSpec(
    name=f'x {x.dtype}{list(x.shape)}, weight {values.dtype}'
    f'{list(values.shape)}, scales {scales.dtype} of {scales.shape[1]} groups',
    num_rows=x.shape[0],
    num_experts=num_experts,
    num_inputs=num_inputs,
    num_outputs=num_outputs,
    group_size=num_inputs // scales.shape[1],
    dtype=x.dtype.name,
    weight_dtype='mxfp4' if float4.is_used(scales) else values.dtype.name,
  )
  return calls.choose(
    'grouped_matmul', spec, implementation, sharding, x, values, scales
  )
