"""Product of few rows in plain JAX.

Legend: N rows, K inputs, A axes of outputs.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import int8_products, norm, products
from kernels_pallas.swiglu import reference as swiglu_reference

# As `products.TOLERANCES`; sums of bfloat16 must be equal.
TOLERANCES = {'float32': 2**-16}


def few_rows(
  rows: jax.Array,
  weight: jax.Array,
  scales: jax.Array | None = None,
  added: jax.Array | None = None,
  norm_scale: jax.Array | None = None,
  *,
  num_terms: int = 1,
  epsilon: float = 0.0,
  activation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """See `api.few_rows`."""
  total = None
  if added is not None:
    total = rows + added
    rows = norm.rms_norm(total, norm_scale, epsilon)
  product = _multiply(rows, weight, scales, num_terms)
  if activation:
    product = swiglu_reference.gated_activation(
      product[:, 0], product[:, 1], activation
    )
  return product if added is None else (total, product)


def _multiply(rows, weight, scales, num_terms):
  if scales is None:
    return products.multiply_transposed(rows, weight)
  terms, row_scales = int8_products.quantize_rows(rows, num_terms)
  product = int8_products.multiply(terms.reshape(-1, rows.shape[1]), weight)
  product = product.reshape(num_terms, len(rows), *scales.shape)
  row_scales = jnp.expand_dims(row_scales[..., 0], range(2, product.ndim))
  total = (product.astype(jnp.float32) * row_scales).sum(axis=0)
  return total * scales[None]
