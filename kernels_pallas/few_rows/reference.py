"""Product of few rows in plain JAX.

Legend: N rows, K inputs, A axes of outputs.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import int8_products, products

# By dtype, of the largest number of a result: implementations add up in
# different orders. Other dtypes must be equal.
TOLERANCES = {'float32': 2**-16}


def few_rows(rows: jax.Array, weight: jax.Array) -> jax.Array:
  """See `api.few_rows`."""
  if rows.dtype == jnp.int8:
    return int8_products.multiply(rows, weight)
  return products.multiply_transposed(rows, weight)
