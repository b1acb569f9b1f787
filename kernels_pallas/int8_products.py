"""Products of int8 weights and rows that become int8, each with a scale.

Integers are summed in int32, so a row's product is the same to the last bit
whatever other rows are beside it, and on any number of devices.

Legend: N rows, K inputs, A axes of outputs.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import products

_LIMIT = 127.0
_FINER = 2 * _LIMIT  # half a step becomes the highest integer
_SMALLEST = 1e-30  # highest number of a row; a row of zeros has it, too


def quantize_rows(
  rows: jax.Array, num_terms: int = 1
) -> tuple[jax.Array, jax.Array]:
  """Rounds rows [N, K] to int8.

  Args:
    rows: [N, K] of any floating dtype.
    num_terms: integers for each number, 1 or 2. The second one stands for what
      the first one leaves, with a scale that is 254 times smaller: 16 bits for
      rows with a few high numbers.

  Returns:
    int8[num_terms, N, K] and the scales f32[num_terms, N, 1].
  """
  rows = rows.astype(jnp.float32)
  highest = jnp.abs(rows).max(axis=-1, keepdims=True)
  highest = jnp.maximum(highest, _SMALLEST)
  scale = highest / _LIMIT
  rest = rows * (_LIMIT / highest)
  terms, scales = [], []
  for _ in range(num_terms):
    integers = jnp.round(rest)
    terms.append(integers.astype(jnp.int8))
    scales.append(scale)
    rest = (rest - integers) * _FINER
    scale = scale / _FINER
  return jnp.stack(terms), jnp.stack(scales)


def multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns int8[N, K] times int8[*A, K], summed: i32[N, *A]."""
  return jax.lax.platform_dependent(
    rows,
    weight,
    cpu=_multiply_on_cpu,
    default=functools.partial(_einsum, 'nk,...k->n...'),
  )


def _multiply_on_cpu(rows, weight):
  """XLA's CPU backend multiplies single rows 10 times slower than two."""
  num_rows = len(rows)
  if num_rows == 1:
    rows = jnp.repeat(rows, 2, axis=0)
  if num_rows > products.FEW_ROWS:
    return products.multiply_parts(_einsum, rows, weight)
  product = _einsum('...k,nk->...n', weight, rows)
  # XLA would swap the operands to save the transposition, and then copy the
  # whole weight to multiply.
  product = jax.lax.optimization_barrier(product)
  return jnp.moveaxis(product, -1, 0)[:num_rows]


def _einsum(subscripts, x, y):
  return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.int32)
