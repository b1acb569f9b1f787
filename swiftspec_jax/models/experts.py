"""Mixtures of experts: each token is fed through a few of many feed-forwards.

All devices have a slice of each expert, as of a dense feed-forward: so they
have equal work whatever experts the few tokens of a step choose.

Legend: N tokens, K experts of a token, X experts, D embed, F width of one.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import products
from kernels_pallas.swiglu import reference as swiglu_reference
from swiftspec_jax.config.architecture import Experts
from swiftspec_jax.models.matrices.quantization import QuantizedMatrix
from swiftspec_jax.models.params import Params


def _route(x, layer, experts):
  """Returns i32[N, K] experts of tokens x [N, D], and f32[N, K] shares."""
  scores = products.look_up_scores(x, layer['router'])
  if experts.use_bias:
    scores = scores + layer['router_bias'].astype(scores.dtype)[None]
  if experts.scales_inputs:
    scores, chosen = jax.lax.top_k(scores, experts.num_active)
    return chosen, jax.nn.sigmoid(scores)
  probs = jax.nn.softmax(scores, axis=-1)
  shares, chosen = jax.lax.top_k(probs, experts.num_active)
  if experts.is_normalized:
    shares = shares / shares.sum(axis=-1, keepdims=True)
  if experts.is_beside_dense:
    shares = shares * layer['router_factors'][chosen]
  return chosen, shares


def feed_forward(
  x: jax.Array,
  layer: Params,
  experts: Experts,
  activation: str,
  router_inputs: jax.Array | None = None,
) -> jax.Array:
  """Returns what the chosen experts make of x [N, D] together: [N, D].

  Args:
    x: normed hidden states.
    layer: parameters of the layer.
    experts: static sizes of the experts.
    activation: static name of the activation, see `ModelConfig`.
    router_inputs: [N, D] hidden states that the experts are chosen by; None
      is x.
  """
  router_inputs = x if router_inputs is None else router_inputs
  chosen, shares = _route(router_inputs, layer, experts)
  chosen = chosen.reshape(-1)
  # Rows of one expert lie side by side.
  order = jnp.argsort(chosen, stable=True)
  sizes = jnp.bincount(chosen, length=experts.num_experts)
  rows, chosen = x[order // experts.num_active], chosen[order]
  if experts.scales_inputs:
    rows *= shares.reshape(-1, 1)[order].astype(rows.dtype)
    shares = jnp.ones_like(shares)

  def product(rows, name, dtype):
    weight = layer[name]
    if isinstance(weight, QuantizedMatrix):
      result = weight.multiply_chosen(rows, chosen).astype(dtype)
    else:
      result = jax.lax.ragged_dot(
        rows, weight, sizes, preferred_element_type=dtype
      )
    if experts.use_bias:
      result = result + layer[f'{name}_bias'][chosen].astype(dtype)
    return result

  gate = product(rows, 'experts_gate', x.dtype)
  up = product(rows, 'experts_up', x.dtype)
  if experts.gate_limit is None:
    hidden = swiglu_reference.gated_activation(gate, up, activation)
  else:
    hidden = _clamped_activation(gate, up, experts)
  outputs = product(hidden, 'experts_down', jnp.float32)
  outputs = outputs[jnp.argsort(order)].reshape(len(x), -1, x.shape[1])
  return (outputs * shares[:, :, None]).sum(axis=1).astype(x.dtype)


def _clamped_activation(gate, up, experts):
  """Returns what `Experts.gate_limit` describes, of [N, F] twice."""
  limit, slope = (
    jnp.asarray(x, gate.dtype) for x in (experts.gate_limit, experts.gate_slope)
  )
  gate = jnp.minimum(gate, limit)
  up = jnp.clip(up, -limit, limit)
  return gate * jax.nn.sigmoid(slope * gate) * (up + 1)
