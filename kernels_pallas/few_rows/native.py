"""Product of few rows in C++.

A weight is read once, whatever the number of rows. Each sum has its own
accumulator and one order, so it does not depend on the rows beside it.

Legend: N rows, K inputs, A axes of outputs.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.native import library

_RESULTS = {'float32': jnp.float32, 'bfloat16': jnp.float32, 'int8': jnp.int32}


def check(dtype: jax.typing.DTypeLike) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  name = jnp.dtype(dtype).name
  if name not in _RESULTS:
    raise NotImplementedError(f'dtype {name} is not {", ".join(_RESULTS)}')
  library.check()


def few_rows(rows: jax.Array, weight: jax.Array) -> jax.Array:
  """See `api.few_rows`."""
  shape = (len(rows), *weight.shape[:-1])
  name = rows.dtype.name
  result = jax.ShapeDtypeStruct(shape, _RESULTS[name])
  return library.call(f'few_rows_{name}', result, rows, weight)
