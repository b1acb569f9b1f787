"""What the kernels of quantized products share: their limits."""

import jax
import jax.numpy as jnp

MOST_ROWS = 64
# Of a number, by dtype of the weight.
BITS = {'int8': 8, 'int4': 4, 'float8_e4m3fn': 8}


def check(
  num_rows: int,
  dtype: jax.typing.DTypeLike,
  values_dtype: jax.typing.DTypeLike,
  most_rows: int = MOST_ROWS,
) -> None:
  """Raises NotImplementedError with the reason if no kernel can do it.

  Args:
    num_rows: number of rows of the product.
    dtype: dtype of these.
    values_dtype: dtype of the weight.
    most_rows: number of rows that kernels take.
  """
  if num_rows > most_rows:
    raise NotImplementedError(f'{num_rows} rows, more than {most_rows}')
  if dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f'{dtype} is neither bfloat16 nor float32')
  if jnp.dtype(values_dtype).name not in BITS:
    raise NotImplementedError(f'{values_dtype} is not one of {", ".join(BITS)}')


def precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
  """Returns that of products with rows of `dtype`: few bits are exact."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
