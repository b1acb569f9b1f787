"""A product with a quantized weight whose devices have a part of it each.

Legend: R rows, P parts or experts, K inputs, N outputs, C groups of inputs.
"""

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def multiply(
  product: Callable[..., jax.Array],
  x: jax.Array,
  values: jax.Array,
  scales: jax.Array,
  *others: jax.Array,
  sharding: NamedSharding,
  result: tuple[None, ...],
) -> jax.Array:
  """Returns `product` of each device's part, added up over parts of the inputs.

  Args:
    product: function of the parts of all arrays.
    x: [R, K].
    values: [P, K, N].
    scales: [P, C, N]. The groups are sharded with the inputs, unless there is
      only one.
    *others: arrays that every device has whole.
    sharding: sharding of `values`, of whose last two axes one may be sharded.
    result: axes of the result in front of the outputs; none is sharded.
  """
  _, inputs, outputs = sharding.spec
  groups = inputs if scales.shape[1] > 1 else None

  def summed(*arrays):
    partial = product(*arrays)
    if inputs is None or sharding.mesh.size == 1:
      return partial
    return jax.lax.psum(partial, inputs)

  return jax.shard_map(
    summed,
    mesh=sharding.mesh,
    in_specs=(
      P(None, inputs),
      P(None, inputs, outputs),
      P(None, groups, outputs),
      *[P()] * len(others),
    ),
    out_specs=P(*result, outputs),
    check_vma=False,
  )(x, values, scales, *others)
