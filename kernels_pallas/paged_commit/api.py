"""The move of kept rows in pages by what suits the devices.

Legend: B rows, T places of each, P pages, Z places of a page, C numbers of a
token.
"""

import functools
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import dispatch, registry, trials, tuning
from kernels_pallas.paged_commit import arg_specs, reference


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
  if implementation in ('pallas_tpu', 'mosaic_gpu'):
    implementation = dispatch.REFERENCE
  shape = caches[0].shape
  if sharding is not None:
    shape = sharding.shard_shape(shape)
  spec = arg_specs.ArgSpec.of_call(
    f'{len(caches)} caches {caches[0].dtype}{list(shape)}, '
    f'{list(sources.shape)} tokens',
    len(caches),
    shape,
    sources.shape,
    caches[0].dtype,
  )
  chosen = dispatch.choose(
    'paged_commit',
    spec.name,
    implementation,
    dispatch.platform_of(sharding),
    registry.checks('paged_commit', shape, sources.shape[1]),
    trial=functools.partial(trials.verdict, 'paged_commit', spec, sharding),
  )
  if chosen == dispatch.REFERENCE:
    return reference.paged_commit(caches, sources, targets)
  call = registry.function('paged_commit', chosen)
  call = tuning.tuned('paged_commit', chosen, call, sharding)
  if sharding is not None:
    pages = P(None, None, (*sharding.spec, None, None, None)[2])
    call = jax.shard_map(
      call,
      mesh=sharding.mesh,
      in_specs=(pages, P(), P()),
      out_specs=pages,
      check_vma=False,
    )
  return call(list(caches), sources, targets)
