"""What the kernels of quantized products share: their limits."""

import jax

from kernels_pallas import products

MOST_ROWS = 64
# Of a number, by dtype of the weight.
BITS = {'int8': 8, 'int4': 4, 'float8_e4m3fn': 8}


def check(x: jax.Array, values: jax.Array, most_rows: int = MOST_ROWS) -> None:
  """Raises NotImplementedError with the reason if no kernel can do it.

  Args:
    x: rows of the product.
    values: weight.
    most_rows: number of rows that kernels take.
  """
  if len(x) > most_rows:
    raise NotImplementedError(f'{len(x)} rows, more than {most_rows}')
  products.check_dtype(x.dtype)
  if values.dtype.name not in BITS:
    raise NotImplementedError(f'{values.dtype} is not one of {", ".join(BITS)}')
