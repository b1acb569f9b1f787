"""The move of kept cache rows in C++, for CPUs: one call for all caches."""

from collections.abc import Sequence

import jax
import numpy as np

from kernels_pallas.native import library


def check(cache: jax.Array, num_rows: int) -> None:
  """Raises NotImplementedError with the reason if there is no kernel."""
  del cache, num_rows
  library.check('attention')


def kv_commit(
  caches: Sequence[jax.Array],
  starts: jax.Array,
  path: jax.Array,
  *,
  num_rows: int,
) -> list[jax.Array]:
  """Returns the caches with the rows moved.

  The arguments are those of `api.kv_commit`.
  """
  moved = library.call(
    'kv_commit',
    [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
    starts,
    path,
    *caches,
    in_place={2 + i: i for i in range(len(caches))},
    num_rows=np.int64(num_rows),
  )
  return list(moved)
