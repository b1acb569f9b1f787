"""What the kernels of this folder share: their limits and their chunks."""

import jax
import jax.numpy as jnp

MOST_ROWS = 64


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
  if values_dtype not in (jnp.int8, jnp.int4):
    raise NotImplementedError(f'{values_dtype} is neither int8 nor int4')


def precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
  """Returns that of products with rows of `dtype`: integers are exact."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
