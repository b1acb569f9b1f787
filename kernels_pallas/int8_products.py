"""Products of int8 weights and rows that become int8, each with a scale.

Integers are summed in int32, so a row's product is the same to the last bit
whatever other rows are beside it, and on any number of devices.

Legend: N rows, K inputs, A axes of outputs.
"""

import jax
import jax.numpy as jnp

_LIMIT = 127.0
_SMALLEST = 1e-30  # highest number of a row; a row of zeros has it, too
_MOST_ROWS_ON_RIGHT = 8


def quantize_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns int8[N, K] and scales f32[N, 1] of rows [N, K]."""
  rows = rows.astype(jnp.float32)
  highest = jnp.abs(rows).max(axis=-1, keepdims=True)
  highest = jnp.maximum(highest, _SMALLEST)
  integers = jnp.round(rows * (_LIMIT / highest)).astype(jnp.int8)
  return integers, highest / _LIMIT


def multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns int8[N, K] times int8[*A, K], summed: i32[N, *A]."""
  return jax.lax.platform_dependent(
    rows, weight, cpu=_multiply_on_cpu, default=_rows_first
  )


def _multiply_on_cpu(rows, weight):
  """XLA's CPU backend multiplies single rows 10 times slower than two."""
  num_rows = len(rows)
  if num_rows == 1:
    rows = jnp.repeat(rows, 2, axis=0)
  if num_rows > _MOST_ROWS_ON_RIGHT:
    return _rows_first(rows, weight)
  product = jnp.einsum(
    '...k,nk->...n', weight, rows, preferred_element_type=jnp.int32
  )
  # XLA would swap the operands to save the transposition, and then copy the
  # whole weight to multiply.
  product = jax.lax.optimization_barrier(product)
  return jnp.moveaxis(product, -1, 0)[:num_rows]


def _rows_first(rows, weight):
  return jnp.einsum(
    'nk,...k->n...', rows, weight, preferred_element_type=jnp.int32
  )
