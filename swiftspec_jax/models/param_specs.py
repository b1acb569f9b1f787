"""Parameters, each declared once: shape, logical axes, initialiser."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import config as config_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models.matrices import (
  int8_dynamic,
  quantization,
  stored_blocks,
)

Specs = dict[str, Any]  # tree of ParamSpec
Scheme = quantization.Scheme | int8_dynamic.Scheme | stored_blocks.Scheme


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """One parameter, unpadded and padded.

  Attributes:
    shape: sizes in the model.
    padded_shape: sizes of the array; the difference is filled with zeros at
      the end of each axis.
    axes: logical name of each axis, None where it is never sharded.
    init_scale: standard deviation of the initialiser; None means ones.
    is_index: token ids, int32.
    num_in_axes: number of leading axes that are inputs of a product; 0 where it
      is no matrix of a layer.
    scheme: kind of quantization; None where there is none.
    kernels: name of the code to run, as in ModelConfig.
  """

  shape: tuple[int, ...]
  padded_shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  init_scale: float | None
  is_index: bool = False
  num_in_axes: int = 0
  scheme: Scheme | None = None
  kernels: str = 'auto'

  @property
  def is_norm(self) -> bool:
    """Norm scales stay float32 whatever the model's dtype."""
    return self.init_scale is None and not self.is_index

  def dtype(self, model_dtype: jax.typing.DTypeLike) -> np.dtype:
    if self.is_index:
      return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float32 if self.is_norm else model_dtype)


def param_specs(config: ModelConfig) -> Specs:
  """Returns the tree of ParamSpec of a model.

  Legend: D embed, G kv heads, Q query heads for each kv head, E head_dim,
  F ffw, V vocabulary, H features. q, k and v of one kv head lie side by side
  in `qkv` ([D, G, Q + 2, E]), gate and up in `gate_up` ([D, 2, F]): one product
  each, and a device's share of heads is one slice of axis G. Where keys are
  values, too, `qkv` has Q + 1. A layer with experts has them in the place of
  `gate_up` and `down`, and a shared expert under names of its own. The first
  layer of an EAGLE-3 head has inputs of 2 D in `qkv`.
  """
  c = config
  spec, _ = _makers(c)
  is_tied = c.tie_embeddings and not c.output_vocab_size
  table = functools.partial(spec, scale=c.embed_dim**-0.5)
  specs = {
    # Rows that are only looked up stay as they are: that is as fast.
    'embedding': table('vocab', 'embed', in_axis=1 if is_tied else None),
    'layers': [_layer_specs(c.of_layer(i), i) for i in range(c.num_layers)],
    'final_norm': spec('embed'),
  }
  if c.recurrent:
    specs |= _recurrent_specs(c)
  elif c.reads_features:
    specs |= _feature_specs(c)
  if c.layer_input_dim:
    specs |= {
      'layer_embedding': table('vocab', 'layer_inputs'),
      'layer_projection': table('embed', 'layer_inputs', in_axis=0),
      'layer_norm': spec('layer_input'),
    }
  if not is_tied:
    inputs = 'head' if c.recurrent else 'embed'
    specs['unembedding'] = table('outputs', inputs, in_axis=1)
  if c.output_vocab_size:
    # Ascending; logit i is that of token output_token_ids[i]. Not padded.
    shape = (c.output_vocab_size,)
    specs['output_token_ids'] = ParamSpec(shape, shape, (None,), None, True)
  return specs


def _makers(
  config: ModelConfig,
) -> tuple[Callable[..., ParamSpec], Callable[..., ParamSpec]]:
  """Returns what declares arrays, and matrices, by the names of their axes."""
  c = config
  num_in_group = c.num_query_groups + c.num_kv_parts
  sizes = {
    'embed': (c.embed_dim, c.embed_dim),
    'kv_heads': (c.num_kv_heads, c.padded_kv_heads),
    'query_groups': (c.num_query_groups, c.num_query_groups),
    'qkv': (num_in_group, num_in_group),
    'head_dim': (c.head_dim, c.head_dim),
    'gate_up': (2, 2),
    'ffw': (c.ffw_dim, c.padded_ffw_dim),
    'experts': (c.num_experts, c.num_experts),
    'expert_ffw': (c.expert_ffw_dim, c.padded_expert_ffw_dim),
    'vocab': (c.vocab_size, c.padded_vocab_size),
    'outputs': (c.num_logits, c.padded_num_logits),
    'features': (c.feature_dim, c.feature_dim),
    # Embedding and feature side by side.
    'pair': (2 * c.embed_dim, 2 * c.embed_dim),
    'head': (_head_width(c), _head_width(c)),
    'one': (1, 1),
    # Of Gemma 4: what a layer gets of a token beside the layer before.
    'layer_input': (c.layer_input_dim, c.layer_input_dim),
    'layer_inputs': (c.num_layers * c.layer_input_dim,) * 2,
  }

  def spec(
    *axes: str, scale: float | None = None, in_axis: int | None = None
  ) -> ParamSpec:
    return ParamSpec(
      shape=tuple(sizes[axis][0] for axis in axes),
      padded_shape=tuple(sizes[axis][1] for axis in axes),
      axes=axes,
      init_scale=scale,
      scheme=None if in_axis is None else _scheme_of_all(c, (in_axis,)),
      kernels=c.kernels,
    )

  def matrix(inputs: tuple[str, ...], *outputs: str) -> ParamSpec:
    in_sizes = [sizes[axis][0] for axis in inputs]
    return dataclasses.replace(
      spec(*inputs, *outputs, scale=math.prod(in_sizes) ** -0.5),
      num_in_axes=len(inputs),
      scheme=_scheme(c, in_sizes, outputs),
    )

  return spec, matrix


def _layer_specs(config: ModelConfig, layer: int) -> Specs:
  """Returns the specs of a layer; `config` is its `ModelConfig.of_layer`."""
  spec, _ = _makers(config)
  specs = {
    'attention_norm': spec('embed'),
    **_attention_specs(config, layer),
    'ffw_norm': spec('embed'),
    **_feed_forward_specs(config, layer),
  }
  if config.use_post_norms:
    specs['post_attention_norm'] = spec('embed')
    specs['post_ffw_norm'] = spec('embed')
  if config.gemma4:
    specs['output_scale'] = spec('one')
  if config.layer_input_dim:
    inner, outer = config.embed_dim**-0.5, config.layer_input_dim**-0.5
    specs |= {
      'input_gate': spec('embed', 'layer_input', scale=inner, in_axis=0),
      'input_out': spec('layer_input', 'embed', scale=outer, in_axis=0),
      'post_input_norm': spec('embed'),
    }
  return specs


def _attention_specs(c: ModelConfig, layer: int) -> Specs:
  spec, matrix = _makers(c)
  attends_with = 'pair' if c.eagle3 and layer == 0 else 'embed'
  specs = {
    'qkv': matrix((attends_with,), 'kv_heads', 'qkv', 'head_dim'),
    'attention_out': matrix(('kv_heads', 'query_groups', 'head_dim'), 'embed'),
  }
  if c.use_qkv_bias:
    specs['qkv_bias'] = spec('kv_heads', 'qkv', 'head_dim', scale=0.02)
  if c.use_output_bias:
    specs['attention_out_bias'] = spec('embed', scale=0.02)
  if c.use_sinks:
    specs['sinks'] = spec('kv_heads', 'query_groups', scale=1.0)
  if c.use_qk_norm:
    specs['query_norm'] = spec('head_dim')
  if c.use_qk_norm and c.num_kv_parts:
    specs['key_norm'] = spec('head_dim')
  return specs


def _feed_forward_specs(config: ModelConfig, layer: int) -> Specs:
  spec, matrix = _makers(config)
  dense = {
    'gate_up': matrix(('embed',), 'gate_up', 'ffw'),
    'down': matrix(('ffw',), 'embed'),
  }
  if not config.has_experts(layer):
    return dense
  inner, outer = config.embed_dim**-0.5, config.expert_ffw_dim**-0.5

  def stacked(*axes, scale):
    array = spec('experts', *axes, scale=scale)
    scheme = None
    if config.weight_dtype is not None:
      scheme = quantization.Scheme(
        is_experts=True,
        weight_dtype=config.weight_dtype,
        group_size=config_lib.group_size(array.shape[1], config.weight_dtype),
        kernels=config.kernels,
      )
    return dataclasses.replace(array, scheme=scheme)

  specs = {
    'router': spec('experts', 'embed', scale=inner),
    'experts_gate': stacked('embed', 'expert_ffw', scale=inner),
    'experts_up': stacked('embed', 'expert_ffw', scale=inner),
    'experts_down': stacked('expert_ffw', 'embed', scale=outer),
  }
  if config.experts.is_beside_dense:
    specs |= dense
    specs |= {
      'post_dense_norm': spec('embed'),
      'router_norm': spec('embed'),
      'router_factors': spec('experts'),
      'experts_norm': spec('embed'),
      'post_experts_norm': spec('embed'),
    }
  if config.experts.has_shared:
    specs['shared_gate_up'] = matrix(('embed',), 'gate_up', 'expert_ffw')
    specs['shared_down'] = matrix(('expert_ffw',), 'embed')
  if config.experts.use_bias:
    bias = functools.partial(spec, 'experts', scale=0.02)
    specs |= {
      'router_bias': bias(),
      'experts_gate_bias': bias('expert_ffw'),
      'experts_up_bias': bias('expert_ffw'),
      'experts_down_bias': bias('embed'),
    }
  return specs


def _head_width(config: ModelConfig) -> int:
  """Width of the blocks of a recurrent head; 0 where there is none."""
  return config.recurrent.width if config.recurrent else 0


def _recurrent_specs(config: ModelConfig) -> Specs:
  """Returns what a recurrent head has, see `recurrent`."""
  spec, matrix = _makers(config)

  def affine(inputs, outputs):
    return {
      'weight': matrix((inputs,), outputs),
      'bias': spec(outputs, scale=0.02),
    }

  recurrent = config.recurrent
  specs: Specs = {
    'blocks': [affine('head', 'head') for _ in range(recurrent.num_blocks)]
  }
  if not recurrent.is_sum:
    specs['recurrence'] = affine('pair', 'embed')
  if recurrent.width != 2 * config.embed_dim:
    specs['head_input'] = affine('pair', 'head')
  return specs


def _feature_specs(config: ModelConfig) -> Specs:
  """Returns what a draft has that reads features."""
  spec, _ = _makers(config)
  fusion = spec('embed', 'embed', scale=config.embed_dim**-0.5, in_axis=0)
  if config.is_mtp:
    return {
      'target_feature_norm': spec('features'),
      'feature_norm': spec('embed'),
      'feature_fusion': fusion,
      'token_norm': spec('embed'),
      'token_fusion': fusion,
    }
  scale = config.feature_dim**-0.5
  specs = {
    'feature_projection': spec('features', 'embed', scale=scale, in_axis=0),
    'feature_norm': spec('embed'),
  }
  if config.eagle3 is None and config.block is None:
    specs['feature_fusion'] = fusion
  elif config.eagle3 and (
    config.eagle3.norm_before_fc or config.eagle3.fc_norm
  ):
    specs['target_feature_norm'] = spec('features')
  if config.eagle3 and config.block:
    specs['mask_feature'] = spec('features', scale=1.0)
  return specs


def _scheme_of_all(
  config: ModelConfig, in_axes: tuple[int, ...], num_terms: int = 1
) -> int8_dynamic.Scheme | stored_blocks.Scheme | None:
  """Returns how weights are quantized, in the layers and outside of them."""
  if config.weight_dtype == config_lib.STORED:
    return stored_blocks.Scheme()
  if config.weight_dtype not in config_lib.DYNAMIC_TERMS:
    return None
  return int8_dynamic.Scheme(
    in_axes=in_axes, num_terms=num_terms, kernels=config.kernels
  )


def _scheme(
  config: ModelConfig, in_sizes: list[int], outputs: tuple[str, ...]
) -> Scheme | None:
  """Returns how a matrix with inputs of these axes is quantized."""
  if config.weight_dtype in (None, 'mxfp4'):
    return None
  num_terms = config_lib.DYNAMIC_TERMS.get(config.weight_dtype, 1)
  of_all = _scheme_of_all(config, tuple(range(len(in_sizes))), num_terms)
  if of_all is not None:
    return of_all
  # No group reaches into another kv head, which may be another device's.
  num_inputs = math.prod(in_sizes[1:] or in_sizes)
  return quantization.Scheme(
    weight_dtype=config.weight_dtype,
    num_in_axes=len(in_sizes),
    num_part_axes=int(outputs[0] == 'gate_up'),
    group_size=config_lib.group_size(num_inputs),
    kernels=config.kernels,
  )
