"""The move of kept cache rows by the implementation that suits the devices.

Legend: B rows, T rows to keep, S cache capacity, G kv heads, E head_dim.
"""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import call_spec, calls
from kernels_pallas.kv_commit import arg_specs


def kv_commit(
  caches: Sequence[jax.Array],
  starts: jax.Array,
  path: jax.Array,
  *,
  num_rows: int,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> list[jax.Array]:
  """Moves row `starts + path[i]` to `starts + i`, for all i, in all caches.

  All implementations give the same numbers. Donated caches stay where they are.

  Args:
    caches: [B, G, S, E] each, of one shape and dtype.
    starts: i32[B] first row of the cache to write.
    path: i32[B, T] rows to keep, counted from `starts`. All are read before
      any is written.
    num_rows: static bound: all of `path` is below it, and T is not above it.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of the caches, whose first two axes alone may be sharded.
      None means JAX's default device.

  Returns:
    The caches [B, G, S, E], in their order.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  if not caches:  # a model without layers
    return caches
  cache = calls.local_part(caches[0], sharding)
  shape = cache.shape
  spec = arg_specs.ArgSpec(
    name=f'{len(caches)} caches {cache.dtype}{list(shape)}, '
    f'{path.shape[1]} of {num_rows} rows',
    num_caches=min(len(caches), arg_specs.MOST_CACHES),
    num_kv_heads=shape[1],
    head_dim=shape[3],
    num_rows=num_rows,
    num_kept=path.shape[1],
    batch_size=min(shape[0], call_spec.MOST_ROWS),
    capacity=min(shape[2], arg_specs.CAPACITY),
    dtype=cache.dtype.name,
  )
  chosen = calls.choose(
    'kv_commit', spec, implementation, sharding, cache, num_rows
  )
  rows, heads = calls.axes_of(sharding, 2)
  return calls.run(
    'kv_commit',
    chosen,
    (list(caches), starts, path),
    {'num_rows': num_rows},
    sharding,
    (P(rows, heads), P(rows), P(rows)),
    P(rows, heads),
  )
