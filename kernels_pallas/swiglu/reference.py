"""Gated activation of a product in plain JAX: what the kernels follow.

Legend: N tokens, D embed, F ffw.
"""

import jax

from kernels_pallas import products, tiles

TOLERANCES = products.TOLERANCES

ACTIVATIONS = ('silu', 'gelu_tanh')


def swiglu(x: jax.Array, gate_up: jax.Array, *, activation: str) -> jax.Array:
  """Returns act(x gate) * (x up); the arguments are those of `api.swiglu`."""
  product = products.multiply(x.reshape(-1, x.shape[-1]), gate_up)
  hidden = gated_activation(product[:, 0], product[:, 1], activation)
  return hidden.reshape(*x.shape[:-1], -1)


def gated_activation(
  gate: jax.Array, up: jax.Array, activation: str
) -> jax.Array:
  """Returns act(gate) * up; `activation` is one of `ACTIVATIONS`."""
  if activation == 'silu':
    return jax.nn.silu(gate) * up
  return jax.nn.gelu(gate, approximate=True) * up


def check(x: jax.Array, *, most_tokens: int) -> None:
  """Raises NotImplementedError for x [N, D] that no kernel can do.

  Args:
    x: rows.
    most_tokens: largest N that the kernel can do.
  """
  products.check_dtype(x.dtype)
  tiles.check_most(len(x), most_tokens, 'tokens')
