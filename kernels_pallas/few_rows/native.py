"""Product of few rows in C++.

A weight is read once, whatever the number of rows. Each sum has its own
accumulator and one order, so it does not depend on the rows beside it.

Legend: N rows, K inputs, A axes of outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import products
from kernels_pallas.native import library
from kernels_pallas.swiglu import reference

DTYPES = ('float32', 'bfloat16')  # of rows


def check(dtype: jax.typing.DTypeLike) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  products.check_dtype(dtype, DTYPES)
  library.check('few_rows')


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
  weights, attributes = (weight,), {}
  if scales is not None:
    weights = (weight, scales)
    attributes = {'num_terms': np.int64(num_terms)}
  return call(
    f'few_rows_{weight.dtype.name}',
    weight.shape[:-1],
    rows if scales is None else in_float32(rows, added),
    added,
    norm_scale,
    *weights,
    epsilon=epsilon,
    activation=activation,
    **attributes,
  )


def in_float32(rows: jax.Array, added: jax.Array | None) -> jax.Array:
  """Returns rows as a kernel takes them that rounds them, or their norm."""
  return rows.astype(jnp.float32) if added is None else rows


def call(
  handler: str,
  out_shape: tuple[int, ...],
  rows: jax.Array,
  added: jax.Array | None,
  norm_scale: jax.Array | None,
  *weights: jax.Array,
  epsilon: float,
  activation: str | None,
  **attributes: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Returns what a function of a library makes of rows, as `api.few_rows`."""
  if added is None:
    added, norm_scale = jnp.zeros(0, rows.dtype), jnp.zeros(0)
  if activation:
    out_shape = out_shape[1:]
  product, total = library.call(
    handler,
    (
      jax.ShapeDtypeStruct((len(rows), *out_shape), jnp.float32),
      jax.ShapeDtypeStruct(added.shape, added.dtype),
    ),
    rows,
    added,
    norm_scale.astype(jnp.float32),
    *weights,
    epsilon=np.float32(epsilon),
    activation=np.int64(
      reference.ACTIVATIONS.index(activation) + 1 if activation else 0
    ),
    **attributes,
  )
  return (total, product) if total.size else product
