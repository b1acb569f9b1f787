"""Product of rows with the quantized weights of their experts in plain JAX.

Legend: R rows, X experts, K inputs, N outputs, C groups of inputs.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_matmul import reference as dense

TOLERANCES = dense.TOLERANCES


def grouped_matmul(
  x: jax.Array, values: jax.Array, scales: jax.Array, chosen: jax.Array
) -> jax.Array:
  """See `api.grouped_matmul`; widens the weights of all experts."""
  product = functools.partial(
    jax.lax.ragged_dot,
    x,
    group_sizes=jnp.bincount(chosen, length=len(values)),
    preferred_element_type=jnp.float32,
  )
  if values.dtype == jnp.int8 and scales.shape[1] == 1:
    total = product(values.astype(x.dtype)) * scales[chosen, 0]
  else:
    total = product(dense.widened(values, scales).astype(x.dtype))
  return total.astype(x.dtype)
