"""Sum, norm and product by what suits devices and shape.

Legend: T rows, P parts, K inputs, N outputs, C groups of inputs.
"""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import calls, dispatch
from kernels_pallas.normed_matmul import arg_specs, reference
from kernels_pallas.quantized_matmul import api as product_api


def normed_matmul(
  x: jax.Array,
  added: jax.Array,
  norm_scale: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *,
  epsilon: float,
  activation: str | None = None,
  implementation: str = 'auto',
  sharding: NamedSharding,
) -> tuple[jax.Array, jax.Array]:
  """Adds rows, and multiplies the norm of the sum with a weight.

  Args:
    x: [T, K] bfloat16 or float32.
    added: [T, K] of the same dtype, what is added to x.
    norm_scale: f32[K] scale of the norm.
    values: weight [P, K, N], as in `quantized_matmul`, whose arguments are the
      others, too.
    scales: f32[P, C, N].
    epsilon: number that is added to the mean square.
    activation: gate that joins two parts, or None.
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`. Where there is no kernel for all of it, the
      name is that of the code of `quantized_matmul`.
    sharding: sharding of `values`, of which the outputs alone may be sharded.

  Returns:
    The sum [T, K], and the product [T, P, N]; [T, 1, N] with an activation.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  options = {'epsilon': epsilon, 'activation': activation}
  chosen = _choose(x, values, scales, options, implementation, sharding)
  if chosen == dispatch.REFERENCE:
    total = x + added
    product = product_api.quantized_matmul(
      reference.rms_norm(total, norm_scale, epsilon),
      values,
      scales,
      activation=activation,
      implementation=implementation,
      sharding=sharding,
    )
    return total, product
  outputs = P(None, None, sharding.spec[2])
  return calls.run(
    'normed_matmul',
    chosen,
    (x, added, norm_scale, values, scales),
    options,
    sharding,
    (P(), P(), P(), outputs, outputs),
    (P(), outputs),
  )


def _choose(x, values, scales, options, wanted, sharding):
  """Returns the name of the implementation for a device's part."""
  weight = jax.ShapeDtypeStruct(
    sharding.shard_shape(values.shape), values.dtype
  )
  spec = arg_specs.ArgSpec.of_call(x, weight, scales, **options)
  wanted = calls.for_triton_alone(wanted)
  return calls.choose(
    'normed_matmul', spec, wanted, sharding, x, weight, scales
  )
