"""Product of few rows in C++.

A weight is read once, whatever the number of rows. Each sum has its own
accumulator and one order, so it does not depend on the rows beside it.

Legend: N rows, K inputs, A axes of outputs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.native import library

_DTYPES = ('float32', 'bfloat16')


def check(dtype: jax.typing.DTypeLike) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  name = jnp.dtype(dtype).name
  if name not in _DTYPES:
    raise NotImplementedError(f'dtype {name} is not {" or ".join(_DTYPES)}')
  library.check()


def few_rows(
  rows: jax.Array,
  weight: jax.Array,
  scales: jax.Array | None = None,
  *,
  num_terms: int = 1,
) -> jax.Array:
  """See `api.few_rows`."""
  shape = (len(rows), *weight.shape[:-1])
  result = jax.ShapeDtypeStruct(shape, jnp.float32)
  name = f'few_rows_{weight.dtype.name}'
  if scales is None:
    return library.call(name, result, rows, weight)
  rows = rows.astype(jnp.float32)
  return library.call(
    name, result, rows, weight, scales, num_terms=np.int64(num_terms)
  )
