"""Gemma 4: its configuration, and what only its layers do.

`config.architecture.Gemma4` says what sets them apart from those of Gemma 3.

Legend: B rows, T tokens, D embed, L layers, P width of a layer's inputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from kernels_pallas.swiglu import reference as swiglu_reference
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Experts, Gemma4
from swiftspec_jax.models import layers
from swiftspec_jax.models.params import Params

# The second is the 12B, which reads images and sound without towers.
FAMILIES = 'gemma4_text', 'gemma4_unified_text'
WITH_TOWERS = 'gemma4', 'gemma4_unified'


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of ModelConfig that Llama lacks, but the window.

  Args:
    values: complete Hugging Face configuration of the decoder.

  Raises:
    UserError: layers that Gemma 4 does not have.
  """
  _check(values)
  kv_heads, head_dim = _global_heads(values)
  experts = None
  if has_experts(values):
    experts = Experts(
      num_experts=values['num_experts'],
      num_active=values['top_k_experts'],
      ffw_dim=values['moe_intermediate_size'],
      is_beside_dense=True,
    )
  return {
    'use_qk_norm': True,
    'use_post_norms': True,
    'embed_scale': values['hidden_size'] ** 0.5,
    'query_scale': 1.0,
    'logit_cap': values['final_logit_softcapping'],
    'gemma4': Gemma4(
      global_kv_heads=kv_heads,
      global_head_dim=head_dim,
      shares_values=values['attention_k_eq_v'],
      num_kv_layers=_num_kv_layers(values),
      widening=2 if values['use_double_wide_mlp'] else 1,
      input_dim=values.get('hidden_size_per_layer_input') or 0,
    ),
    'experts': experts,
  }


def _check(values: Mapping[str, Any]) -> None:
  kinds, num_kv_layers = values['layer_types'], _num_kv_layers(values)
  table = values.get('vocab_size_per_layer_input')
  has_inputs = values.get('hidden_size_per_layer_input')
  demands = {
    'use_bidirectional_attention': (
      values['use_bidirectional_attention'] != 'all',
      'text is read from left to right',
    ),
    'num_kv_shared_layers': (
      {*kinds[num_kv_layers:]} <= {*kinds[:num_kv_layers]},
      'a layer of the same kind must have keys and values',
    ),
    'vocab_size_per_layer_input': (
      not has_inputs or table == values['vocab_size'],
      f'it must be vocab_size={values["vocab_size"]}',
    ),
  }
  for name, (is_met, demand) in demands.items():
    if not is_met:
      raise errors.UserError(
        f'{name}={values[name]!r} is not supported for '
        f'{values["model_type"]}; {demand}'
      )


def _num_kv_layers(values: Mapping[str, Any]) -> int:
  return values['num_hidden_layers'] - values['num_kv_shared_layers']


def has_experts(values: Mapping[str, Any]) -> bool:
  """Whether the layers of a configuration have experts."""
  return bool(values.get('enable_moe_block'))


def _global_heads(values: Mapping[str, Any]) -> tuple[int, int]:
  """Returns number and size of the kv heads of layers without a window."""
  sizes = 'num_key_value_heads', 'head_dim'
  if 'per_layer_config' not in values:  # older releases of transformers
    num_heads, head_dim = (values[name] for name in sizes)
    if values['attention_k_eq_v']:
      num_heads = values['num_global_key_value_heads'] or num_heads
    return num_heads, values['global_head_dim'] or head_dim
  changes = {int(i): x for i, x in values['per_layer_config'].items()}
  found = {
    tuple(changes.get(i, {}).get(name, values[name]) for name in sizes)
    for i, kind in enumerate(values['layer_types'])
    if kind == 'full_attention'
  }
  if len(found) != 1:
    raise errors.UserError(
      f'per_layer_config={changes} is not supported for '
      f'{values["model_type"]}; layers without a window have heads of one size'
    )
  return found.pop()


def layer_inputs(
  params: Params, config: ModelConfig, token_ids: jax.Array, x: jax.Array
) -> list[jax.Array]:
  """Returns what each layer gets of the tokens: L x [B, T, P].

  Args:
    params: parameters of the model.
    config: configuration of the model.
    token_ids: i32[B, T].
    x: [B, T, D] their embeddings, as the first layer gets them.
  """
  width = config.layer_input_dim
  shape = *token_ids.shape, config.num_layers, width
  of_tokens = layers.take_rows(params['layer_embedding'], token_ids)
  projected = layers.product(x, params['layer_projection'])
  projected = (projected * config.embed_dim**-0.5).reshape(shape)
  normed = layers.rms_norm(projected, params['layer_norm'], config.norm_eps)
  inputs = (normed + (of_tokens * width**0.5).reshape(shape)) * 2**-0.5
  return [inputs[:, :, i] for i in range(config.num_layers)]


def output(
  x: jax.Array, layer: Params, config: ModelConfig, inputs: jax.Array | None
) -> jax.Array:
  """Returns what a layer makes of x [B, T, D] after its feed-forward.

  Args:
    x: hidden states.
    layer: parameters of the layer.
    config: configuration of the model.
    inputs: [B, T, P] of `layer_inputs`; None where there are none.
  """
  if inputs is not None:
    gate = layers.product(x, layer['input_gate'])
    gated = swiglu_reference.gated_activation(gate, inputs, config.activation)
    found = layers.product(gated, layer['input_out'])
    x = x + layers.rms_norm(found, layer['post_input_norm'], config.norm_eps)
  return x * layer['output_scale'].astype(x.dtype)[None, None]


def extras(
  get: Callable[..., np.ndarray], config: ModelConfig, prefix: str
) -> Params:
  """Returns what a layer has beside what other families have.

  Args:
    get: function from name and shape to the tensor.
    config: the model's.
    prefix: beginning of the names.
  """
  c = config

  def norm(name, size=c.embed_dim):
    return get(f'{prefix}{name}', size).astype(np.float32)

  arrays = {'output_scale': norm('layer_scalar', 1)}
  if c.layer_input_dim:
    gate, out = f'{prefix}per_layer_input_gate', f'{prefix}per_layer_projection'
    arrays |= {
      'input_gate': get(f'{gate}.weight', c.layer_input_dim, c.embed_dim).T,
      'input_out': get(f'{out}.weight', c.embed_dim, c.layer_input_dim).T,
      'post_input_norm': norm('post_per_layer_input_norm.weight'),
    }
  if c.experts:
    arrays |= {
      'post_dense_norm': norm('post_feedforward_layernorm_1.weight'),
      'router_norm': norm('router.scale') * c.embed_dim**-0.5,
      'router_factors': norm('router.per_expert_scale', c.num_experts),
      'experts_norm': norm('pre_feedforward_layernorm_2.weight'),
      'post_experts_norm': norm('post_feedforward_layernorm_2.weight'),
    }
  return arrays


def tables(get: Callable[..., np.ndarray], config: ModelConfig) -> Params:
  """Returns what the inputs of all layers are made with.

  Args:
    get: function from name and shape to the tensor.
    config: the model's.
  """
  c = config
  width = c.num_layers * c.layer_input_dim
  embedding = 'model.embed_tokens_per_layer.weight'
  projection = 'model.per_layer_model_projection.weight'
  norm = 'model.per_layer_projection_norm.weight'
  return {
    'layer_embedding': get(embedding, c.vocab_size, width),
    'layer_projection': get(projection, width, c.embed_dim).T,
    'layer_norm': get(norm, c.layer_input_dim).astype(np.float32),
  }
