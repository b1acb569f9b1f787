"""Mixtures of experts: each token is fed through a few of many feed-forwards.

All devices have a slice of each expert, as of a dense feed-forward: so they
have equal work whatever experts the few tokens of a step choose.

Legend: N tokens, K experts of a token, X experts, D embed, F width of one.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import products
from kernels_pallas.swiglu import reference as swiglu_reference
from swiftspec_jax.architecture import Experts
from swiftspec_jax.models.params import Params


def route(
  x: jax.Array, router: jax.Array, experts: Experts
) -> tuple[jax.Array, jax.Array]:
  """Returns the experts of each token, and their shares in its output.

  Args:
    x: [N, D].
    router: [X, D].
    experts: static sizes of the experts.

  Returns:
    Numbers i32[N, K] and shares f32[N, K].
  """
  probs = jax.nn.softmax(products.look_up_scores(x, router), axis=-1)
  shares, chosen = jax.lax.top_k(probs, experts.num_active)
  if experts.is_normalized:
    shares = shares / shares.sum(axis=-1, keepdims=True)
  return chosen, shares


def feed_forward(
  x: jax.Array, layer: Params, experts: Experts, activation: str
) -> jax.Array:
  """Returns what the chosen experts make of x [N, D] together: [N, D].

  Args:
    x: normed hidden states.
    layer: parameters of the layer.
    experts: static sizes of the experts.
    activation: static name of the activation, see `ModelConfig`.
  """
  chosen, shares = route(x, layer['router'], experts)
  chosen = chosen.reshape(-1)
  # Rows of one expert lie side by side.
  order = jnp.argsort(chosen, stable=True)
  sizes = jnp.bincount(chosen, length=experts.num_experts)
  rows = x[order // experts.num_active]
  gate = jax.lax.ragged_dot(rows, layer['experts_gate'], sizes)
  up = jax.lax.ragged_dot(rows, layer['experts_up'], sizes)
  hidden = swiglu_reference.gated_activation(gate, up, activation)
  outputs = jax.lax.ragged_dot(
    hidden,
    layer['experts_down'],
    sizes,
    preferred_element_type=jnp.float32,
  )
  outputs = outputs[jnp.argsort(order)].reshape(len(x), -1, x.shape[1])
  return (outputs * shares[:, :, None]).sum(axis=1).astype(x.dtype)
