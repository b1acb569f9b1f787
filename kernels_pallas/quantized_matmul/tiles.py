"""What the kernels of this folder share: their limits and their chunks."""

import jax
import jax.numpy as jnp

MOST_ROWS = 64
# Of a number, by dtype of the weight.
BITS = {'int8': 8, 'int4': 4, 'float8_e4m3fn': 8}


def check(
  num_rows: int,
  dtype: jax.typing.DTypeLike,
  values_dtype: jax.typing.DTypeLike,
) -> None:
  """Raises NotImplementedError with the reason if no kernel can do it."""
  if num_rows > MOST_ROWS:
    raise NotImplementedError(f'{num_rows} rows, more than {MOST_ROWS}')
  if dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f'{dtype} is neither bfloat16 nor float32')
  if jnp.dtype(values_dtype).name not in BITS:
    raise NotImplementedError(f'{values_dtype} is not one of {", ".join(BITS)}')


def precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
  """Returns that of products with rows of `dtype`: few bits are exact."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
