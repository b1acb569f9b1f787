"""Sum, norm and product by what suits devices and shape.

Legend: T rows, P parts, K inputs, N outputs, C groups of inputs.
"""

import functools

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import dispatch, registry, trials, tuning
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
  arrays = (x, added, norm_scale, values, scales)
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
  call = registry.function('normed_matmul', chosen)
  call = functools.partial(call, **options)
  outputs = P(None, None, sharding.spec[2])
  return jax.shard_map(
    tuning.tuned('normed_matmul', chosen, call, sharding),
    mesh=sharding.mesh,
    in_specs=(P(), P(), P(), outputs, outputs),
    out_specs=(P(), outputs),
    check_vma=False,
  )(*arrays)


def _choose(x, values, scales, options, wanted, sharding):
  """Returns the name of the implementation for a device's part."""
  if wanted in ('pallas_tpu', 'mosaic_gpu'):
    wanted = dispatch.REFERENCE
  weight = jax.ShapeDtypeStruct(
    sharding.shard_shape(values.shape), values.dtype
  )
  num_parts, num_inputs, num_outputs = weight.shape
  described = (
    f'x {x.dtype}{list(x.shape)}, weight {weight.dtype}{list(weight.shape)}, '
    f'{scales.shape[1]} groups, {options["activation"]}'
  )
  spec = arg_specs.ArgSpec(
    name=described,
    num_tokens=x.shape[0],
    num_parts=num_parts,
    num_inputs=num_inputs,
    num_outputs=num_outputs,
    group_size=num_inputs // scales.shape[1],
    dtype=x.dtype.name,
    weight_dtype=values.dtype.name,
    **options,
  )
  return dispatch.choose(
    'normed_matmul',
    described,
    wanted,
    dispatch.platform_of(sharding),
    registry.checks('normed_matmul', x, weight, scales),
    trial=functools.partial(trials.verdict, 'normed_matmul', spec, sharding),
  )
