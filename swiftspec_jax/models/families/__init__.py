"""Model families by `model_type`: how their `config.json` is read.

Everything a family changes lies in this folder; how its named tensors become
the parameter tree in `tensors`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Experts
from swiftspec_jax.models import rope_scaling
from swiftspec_jax.models.families import gemma4, llama4
from swiftspec_jax.models.families.tensors import Place as Place
from swiftspec_jax.models.families.tensors import get_checked as get_checked
from swiftspec_jax.models.families.tensors import layer_from_hf as layer_from_hf
from swiftspec_jax.models.families.tensors import (
  params_from_hf as params_from_hf,
)

MIMO = 'mimo'  # Qwen 2 with layers for multi-token prediction
# Models that read images, of which only the decoder is read.
_WITH_TOWER = llama4.WITH_TOWER, *gemma4.WITH_TOWERS
# Families that transformers lacks, by those whose config.json is the same.
SAME_CONFIG = {MIMO: 'qwen2'}
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What sets a family apart from Llama.

  Attributes:
    fields: function from the complete Hugging Face configuration to those
      fields of ModelConfig that are not Llama's.
    unsupported_options: entries of that configuration that the decoder lacks.
      Only those that the family has: elsewhere such an entry means nothing.
    norm_offset: number that is added to the norm scales of a checkpoint; 1
      where it stores them relative to one.
  """

  fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}
  unsupported_options: tuple[str, ...] = ()
  norm_offset: float = 0.0


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """Translates a complete Hugging Face configuration (transformers 5 form).

  Args:
    values: `transformers.PretrainedConfig.to_dict()`.

  Raises:
    UserError: a family, activation or option that the decoder lacks.
  """
  name = values.get('model_type')
  if name in _WITH_TOWER:  # the decoder inside
    names = 'tie_word_embeddings', 'eos_token_id', 'quantization_config'
    own = {k: values[k] for k in names if values.get(k) is not None}
    return config_from_hf({**values['text_config'], **own})
  errors.check_known('unknown architecture', name, supported())
  family = FAMILIES[name]
  for option in ('quantization_config', *family.unsupported_options):
    if values.get(option):
      raise errors.UserError(
        f'{option}={values[option]!r} is not supported for {name}'
      )
  activation = values.get('hidden_act') or values['hidden_activation']
  errors.check_known('unknown activation', activation, _ACTIVATIONS)
  num_heads = values['num_attention_heads']
  head_dim = values.get('head_dim') or values['hidden_size'] // num_heads
  fields = {
    'family': name,
    'vocab_size': values['vocab_size'],
    'num_layers': values['num_hidden_layers'],
    'embed_dim': values['hidden_size'],
    'num_heads': num_heads,
    'num_kv_heads': values['num_key_value_heads'],
    'head_dim': head_dim,
    'ffw_dim': values['intermediate_size'],
    'eos_token_ids': _as_tuple(values.get('eos_token_id')),
    'norm_eps': values['rms_norm_eps'],
    **rope_scaling.fields_from_hf(values, head_dim),
    'tie_embeddings': values['tie_word_embeddings'],
    'activation': _ACTIVATIONS[activation],
  }
  return ModelConfig(**{**fields, **family.fields(values)})


def supported() -> tuple[str, ...]:
  """Returns the kinds of models that are known, by `model_type`."""
  return *FAMILIES, *_WITH_TOWER


def _as_tuple(token_ids: int | list[int] | None) -> tuple[int, ...]:
  if token_ids is None:
    return ()
  return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)


def _sliding(values: Mapping[str, Any]) -> dict[str, Any]:
  """The window, and the layers it holds for."""
  window = values.get('sliding_window')
  if window is None:
    return {}
  layers = tuple(kind == 'sliding_attention' for kind in values['layer_types'])
  if not any(layers):
    return {}
  return {'sliding_window': window, 'sliding_layers': layers}


def _gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
  return {
    **_sliding(values),
    # It counts the stretched context, whatever the scaling.
    'max_context': values['max_position_embeddings'],
    'use_qk_norm': True,
    'use_post_norms': True,
    'embed_scale': values['hidden_size'] ** 0.5,
    'query_scale': values['query_pre_attn_scalar'] ** -0.5,
  }


def _qwen3_moe(values: Mapping[str, Any]) -> dict[str, Any]:
  period = values['decoder_sparse_step']
  layers = range(values['num_hidden_layers'])
  dense_layers = {i for i in layers if (i + 1) % period}
  return {
    'sliding_window': values.get('sliding_window'),
    'use_qk_norm': True,
    'experts': Experts(
      # Newer releases rename it.
      num_experts=values.get('num_experts') or values['num_local_experts'],
      num_active=values['num_experts_per_tok'],
      ffw_dim=values['moe_intermediate_size'],
      is_normalized=values['norm_topk_prob'],
      dense_layers=tuple(sorted(dense_layers.union(values['mlp_only_layers']))),
    ),
  }


def _qwen2(values: Mapping[str, Any]) -> dict[str, Any]:
  return {**_sliding(values), 'use_qkv_bias': True}


def _mimo(values: Mapping[str, Any]) -> dict[str, Any]:
  has_bias = values.get('attention_bias', True)
  if not has_bias:
    raise errors.UserError(
      f'attention_bias={has_bias} is not supported for {MIMO}; its queries, '
      'keys and values have biases'
    )
  return _qwen2(values)


def _gpt_oss(values: Mapping[str, Any]) -> dict[str, Any]:
  return {
    **_sliding(values),
    'use_qkv_bias': values['attention_bias'],
    'use_output_bias': values['attention_bias'],
    'use_sinks': True,
    'experts': Experts(
      num_experts=values['num_local_experts'],
      num_active=values['num_experts_per_tok'],
      ffw_dim=values['intermediate_size'],
      use_bias=True,
      gate_limit=values.get('swiglu_limit', 7.0),
      gate_slope=values.get('swiglu_alpha', 1.702),
    ),
  }


# By the `model_type` of config.json; more may be added.
FAMILIES: dict[str, Family] = {
  'llama': Family(unsupported_options=('attention_bias', 'mlp_bias')),
  'mistral': Family(
    fields=lambda values: {'sliding_window': values.get('sliding_window')}
  ),
  'qwen2': Family(fields=_qwen2),
  MIMO: Family(fields=_mimo, unsupported_options=('use_mrope',)),
  'qwen3': Family(
    fields=lambda values: {**_sliding(values), 'use_qk_norm': True},
    unsupported_options=('attention_bias',),
  ),
  'qwen3_moe': Family(
    fields=_qwen3_moe, unsupported_options=('attention_bias',)
  ),
  'gpt_oss': Family(fields=_gpt_oss),
  llama4.FAMILY: Family(
    fields=llama4.fields, unsupported_options=('attention_bias',)
  ),
  'gemma3_text': Family(
    fields=_gemma3,
    unsupported_options=(
      'attention_bias',
      'attn_logit_softcapping',
      'final_logit_softcapping',
      'use_bidirectional_attention',
    ),
    norm_offset=1.0,
  ),
  **dict.fromkeys(
    gemma4.FAMILIES,
    Family(
      fields=lambda values: {**_sliding(values), **gemma4.fields(values)},
      unsupported_options=('attention_bias',),
    ),
  ),
}
