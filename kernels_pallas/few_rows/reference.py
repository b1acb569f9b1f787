"""Product of few rows in plain JAX.

Legend: N rows, K inputs, A axes of outputs.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import int8_products, products

# By dtype, of the largest number of a result: implementations add up in
# different orders. Other dtypes must be equal.
TOLERANCES = {'float32': 2**-16}


def few_rows(
  rows: jax.Array,
  weight: jax.Array,
  scales: jax.Array | None = None,
  *,
  num_terms: int = 1,
) -> jax.Array:
  """See `api.few_rows`."""
  if scales is None:
    return products.multiply_transposed(rows, weight)
  terms, row_scales = int8_products.quantize_rows(rows, num_terms)
  product = int8_products.multiply(terms.reshape(-1, rows.shape[1]), weight)
  product = product.reshape(num_terms, len(rows), *scales.shape)
  row_scales = jnp.expand_dims(row_scales[..., 0], range(2, product.ndim))
  total = (product.astype(jnp.float32) * row_scales).sum(axis=0)
  return total * scales[None]
