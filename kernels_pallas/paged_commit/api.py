"""The move of kept rows in pages by what suits the devices.

Legend: B rows, T places of each, P pages, Z places of a page, C numbers of a
token.
"""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import call_spec, calls
from kernels_pallas.kv_commit import arg_specs as dense_specs
from kernels_pallas.paged_commit import arg_specs


def paged_commit(
  caches: Sequence[jax.Array],
  sources: jax.Array,
  targets: jax.Array,
  *,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> list[jax.Array]:
  """Moves tokens of rows to other places, in the pages of all caches.

  All implementations give the same numbers. Donated caches stay where they are.

  Args:
    caches: [P, Z, C] each, of one shape and dtype.
    sources: i32[B, T] page * Z + offset of the tokens to move. All of a row are
      read before any is written; no row reads what another one writes.
    targets: i32[B, T] where they go; P * Z or more is nowhere.
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`. Where there is no kernel, it is the reference.
    sharding: sharding of the caches, whose last axis alone may be sharded. None
      means JAX's default device.

  Returns:
    The caches [P, Z, C], in their order.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  if not caches or not sources.size:
    return list(caches)
  cache = calls.local_part(caches[0], sharding)
  _, page_size, width = cache.shape
  num_rows, num_kept = sources.shape
  spec = arg_specs.ArgSpec(
    name=f'{len(caches)} caches {cache.dtype}{list(cache.shape)}, '
    f'{list(sources.shape)} tokens',
    num_caches=min(len(caches), dense_specs.MOST_CACHES),
    width=width,
    num_kept=num_kept,
    batch_size=min(num_rows, call_spec.MOST_ROWS),
    page_size=page_size,
    dtype=cache.dtype.name,
  )
  wanted = calls.for_triton_alone(implementation)
  chosen = calls.choose('paged_commit', spec, wanted, sharding, cache, num_kept)
  pages = P(*calls.axes_of(sharding, 3))
  return calls.run(
    'paged_commit',
    chosen,
    (list(caches), sources, targets),
    {},
    sharding,
    (pages, P(), P()),
    pages,
  )
