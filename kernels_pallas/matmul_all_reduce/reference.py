"""The product and its sum in plain JAX: what the kernel follows.

Legend: B rows, T tokens, K inputs, D outputs.
"""

import jax

from kernels_pallas import products


def matmul_all_reduce(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns x [B, T, K] times a weight [..., D] of K inputs: [B, T, D].

  Where devices share K, the compiler adds the sum over them.
  """
  weight = weight.reshape(x.shape[2], -1)
  product = products.multiply(x.reshape(-1, x.shape[2]), weight)
  return product.reshape(*x.shape[:2], -1)
