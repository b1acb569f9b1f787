"""What a decoder layer has after its attention, dense or of experts.

Legend: B rows, T new tokens, D embed.
"""

import functools

import jax

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import experts, layer_products, layers
from swiftspec_jax.models.params import Params


def outputs(
  x: jax.Array,
  added: jax.Array,
  layer: Params,
  config: ModelConfig,
  products: layer_products.Products,
) -> tuple[jax.Array, jax.Array]:
  """Returns x + added, and what the layer makes of its norm, each [B, T, D].

  Args:
    x: [B, T, D] hidden states.
    added: [B, T, D] what attention adds to them.
    layer: parameters of the layer.
    config: sizes of the layer, of `ModelConfig.of_layer`.
    products: functions that make the products.
  """
  if 'router' not in layer:
    gate = functools.partial(
      layer_products.gate, products=products, activation=config.activation
    )
    x, hidden = layer_products.of_norm(
      x,
      added,
      layer['ffw_norm'],
      layer['gate_up'],
      config,
      gate,
      config.activation,
    )
    return x, layer_products.project(hidden, layer['down'], products)
  x = x + added
  return x, _with_experts(x, layer, config, products)


def _with_experts(x, layer, config, products):
  """Returns what a layer with experts adds to x [B, T, D]."""

  def normed(array, name):
    return layers.rms_norm(array, layer[name], config.norm_eps)

  hidden = normed(x, 'ffw_norm')
  if config.experts.is_beside_dense:
    dense = normed(_dense(hidden, layer, config, products), 'post_dense_norm')
    router_inputs = normed(x, 'router_norm')
    mixed = _mix(normed(x, 'experts_norm'), router_inputs, layer, config)
    return dense + normed(mixed, 'post_experts_norm')
  mixed = _mix(hidden, hidden, layer, config)
  if not config.experts.has_shared:
    return mixed
  return mixed + _dense(hidden, layer, config, products, 'shared_')


@jax.named_scope('experts')
def _mix(x, router_inputs, layer, config):
  rows, router_rows = (
    array.reshape(-1, array.shape[-1]) for array in (x, router_inputs)
  )
  return experts.feed_forward(
    rows, layer, config.experts, config.activation, router_rows
  ).reshape(x.shape)


def _dense(x, layer, config, products, prefix=''):
  gate_up, down = layer[f'{prefix}gate_up'], layer[f'{prefix}down']
  hidden = layer_products.gate(x, gate_up, products, config.activation)
  return layer_products.project(hidden, down, products)
