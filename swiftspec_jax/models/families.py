"""Model families: Hugging Face configurations and parameter names.

Everything a family changes lies here: how its `config.json` becomes a
ModelConfig and how its named tensors become the parameter tree.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Experts
from swiftspec_jax.models import gemma4, llama4, rope_scaling, vision_families
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.array_parts import Joined
from swiftspec_jax.models.params import Params

# Puts a part of the parameters, described by the specs, on the devices.
Place = Callable[[Params, Params], Params]

_NUM_THREADS = 8  # that read layers; each holds one in memory
MIMO = 'mimo'  # Qwen 2 with layers for multi-token prediction
LLAVA = 'llava'  # a vision tower around a decoder of one of the families
# Families of which only the decoder is read.
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
  if name == LLAVA:
    vision = vision_families.vision_from_hf(values)
    return dataclasses.replace(_decoder_of(values), vision=vision)
  if name in _WITH_TOWER:
    return _decoder_of(values)
  if name not in FAMILIES:
    raise errors.UserError(
      f'unknown architecture {name!r}; supported: {", ".join(supported())}'
    )
  family = FAMILIES[name]
  for option in ('quantization_config', *family.unsupported_options):
    if values.get(option):
      raise errors.UserError(
        f'{option}={values[option]!r} is not supported for {name}'
      )
  num_heads = values['num_attention_heads']
  # By kind of layer where these differ.
  rope = values['rope_parameters']
  rope = rope.get('full_attention', rope)
  fields = {
    'family': name,
    'vocab_size': values['vocab_size'],
    'num_layers': values['num_hidden_layers'],
    'embed_dim': values['hidden_size'],
    'num_heads': num_heads,
    'num_kv_heads': values['num_key_value_heads'],
    'head_dim': values.get('head_dim') or values['hidden_size'] // num_heads,
    'ffw_dim': values['intermediate_size'],
    'max_context': values['max_position_embeddings'],
    'eos_token_ids': _as_tuple(values.get('eos_token_id')),
    'norm_eps': values['rms_norm_eps'],
    'rope_theta': rope['rope_theta'],
    'rope_scaling': rope_scaling.from_hf(
      rope, values['max_position_embeddings']
    ),
    'tie_embeddings': values['tie_word_embeddings'],
    'activation': _activation(values),
  }
  return ModelConfig(**{**fields, **family.fields(values)})


def supported() -> tuple[str, ...]:
  """Returns the kinds of models that are known, by `model_type`."""
  return *FAMILIES, LLAVA, *_WITH_TOWER


def _decoder_of(values: Mapping[str, Any]) -> ModelConfig:
  """Returns the decoder inside of a model that reads images."""
  names = 'tie_word_embeddings', 'eos_token_id', 'quantization_config'
  own = {k: values[k] for k in names if values.get(k) is not None}
  return config_from_hf({**values['text_config'], **own})


def _activation(values: Mapping[str, Any]) -> str:
  name = values.get('hidden_act') or values['hidden_activation']
  if name not in _ACTIVATIONS:
    raise errors.UserError(
      f'unknown activation {name!r}; supported: {", ".join(_ACTIVATIONS)}'
    )
  return _ACTIVATIONS[name]


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
  local_rope = values['rope_parameters']['sliding_attention']
  return {
    **_sliding(values),
    'use_qk_norm': True,
    'use_post_norms': True,
    'embed_scale': values['hidden_size'] ** 0.5,
    'query_scale': values['query_pre_attn_scalar'] ** -0.5,
    'local_rope_theta': local_rope['rope_theta'],
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


def params_from_hf(
  get: Callable[[str], np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  place: Place,
  read_matrices: Callable[[str, int], Params] | None = None,
) -> Params:
  """Assembles the parameter tree from tensors with Hugging Face names.

  Args:
    get: function that returns the tensor of a name, and raises UserError when
      it is missing. It is called from several threads.
    config: sizes of the model.
    norm_offset: number added to norm scales (1 where the checkpoint stores
      them relative to one, as Gemma's do).
    place: function that puts a part of the tree on the devices, as soon as it
      is read.
    read_matrices: function as in `layer_from_hf`.

  Returns:
    What `place` makes of the tree of `param_specs(config)`.
  """
  c = config
  get = functools.partial(get_checked, get)
  specs = params_lib.param_specs(c)
  names = {'embedding': 'model.embed_tokens.weight'}
  if not c.tie_embeddings:
    names['unembedding'] = 'lm_head.weight'
  final_norm = get('model.norm.weight', c.embed_dim)
  final_norm = final_norm.astype(np.float32) + norm_offset

  def table(key: str) -> Params:
    return place(get(names[key], c.vocab_size, c.embed_dim), specs[key])

  def layer(i: int) -> Params:
    arrays = layer_from_hf(
      get, c, norm_offset, i, 'model.', read_matrices=read_matrices
    )
    return place(arrays, specs['layers'][i])

  with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
    # The largest first.
    tables = pool.map(table, names)
    layers = pool.map(layer, range(c.num_layers))
    params = {
      **dict(zip(names, tables, strict=True)),
      'layers': list(layers),
      'final_norm': place(final_norm, specs['final_norm']),
    }
  if c.vision:
    tower = vision_families.params_from_hf(get, c.vision, c.embed_dim)
    params['vision'] = place(tower, specs['vision'])
  if c.layer_input_dim:
    tables = gemma4.tables(get, c)
    params |= place(tables, {name: specs[name] for name in tables})
  return params


def get_checked(
  get: Callable[[str], np.ndarray], name: str, *shape: int
) -> np.ndarray:
  """Returns `get(name)`; raises UserError if it has another shape."""
  array = get(name)
  if array.shape != shape:
    raise errors.UserError(
      f'tensor {name} has shape {array.shape}, the config says {shape}: '
      'weights and config do not belong together'
    )
  return array


def layer_from_hf(
  get: Callable[..., np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  layer: int,
  start: str,
  attention_width: int | None = None,
  read_matrices: Callable[[str, int], Params] | None = None,
) -> Params:
  """Returns the unpadded arrays of one layer, in views of its tensors.

  Args:
    get: function from name and shape to the tensor.
    config: the model's.
    norm_offset: number as in `params_from_hf`.
    layer: number of the layer.
    start: beginning of all names.
    attention_width: inputs of queries, keys and values; None is D.
    read_matrices: function from the start of a layer's names and its number to
      its matrices, where they are stored in another way than as tensors of
      weights.
  """
  c, prefix = config.of_layer(layer), f'{start}layers.{layer}.'
  attention_width = attention_width or c.embed_dim
  num_heads = [('q', c.num_heads), ('k', c.num_kv_heads), ('v', c.num_kv_heads)]
  # Sorted by the kv head that they belong to.
  grouped = (c.num_kv_heads, -1, c.head_dim)

  def linear(name, num_out, num_in):
    return get(f'{prefix}{name}.weight', num_out, num_in)

  def heads(kind, *inputs):
    arrays = [
      get(f'{prefix}self_attn.{name}_proj.{kind}', count * c.head_dim, *inputs)
      for name, count in num_heads[: 1 + c.num_kv_parts]
    ]
    return as_rotated([x.reshape(*grouped, *inputs) for x in arrays], c, 2)

  def matrices():
    out = linear('self_attn.o_proj', c.embed_dim, c.num_heads * c.head_dim)
    return {
      # [G, Q + 2, E, D] -> [D, G, Q + 2, E]
      'qkv': Joined(heads('weight', attention_width), 1, (3, 0, 1, 2)),
      # [D, heads * E] -> [G, Q, E, D]
      'attention_out': out.T.reshape(*grouped, c.embed_dim),
      **_feed_forward(get, c, layer, prefix),
    }

  arrays = read_matrices(prefix, layer) if read_matrices else matrices()
  if c.use_output_bias:
    name = f'{prefix}self_attn.o_proj.bias'
    arrays['attention_out_bias'] = get(name, c.embed_dim)
  if c.use_sinks:
    sinks = get(f'{prefix}self_attn.sinks', c.num_heads)
    arrays['sinks'] = sinks.reshape(c.num_kv_heads, -1)
  if c.use_qkv_bias:
    arrays['qkv_bias'] = np.concatenate(heads('bias'), axis=1)
  return arrays | _scales(get, c, norm_offset, prefix)


def _scales(
  get: Callable[..., np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  prefix: str,
) -> Params:
  """Returns the scales of the norms of a layer, and of its output."""
  c = config

  def norm(name, size=c.embed_dim):
    array = get(f'{prefix}{name}.weight', size)
    return array.astype(np.float32) + norm_offset

  arrays = {'attention_norm': norm('input_layernorm')}
  if c.use_qk_norm:
    arrays['query_norm'] = norm('self_attn.q_norm', c.head_dim)
  if c.use_qk_norm and c.num_kv_parts:
    arrays['key_norm'] = norm('self_attn.k_norm', c.head_dim)
  if c.use_post_norms:
    arrays['post_attention_norm'] = norm('post_attention_layernorm')
    arrays['ffw_norm'] = norm('pre_feedforward_layernorm')
    arrays['post_ffw_norm'] = norm('post_feedforward_layernorm')
  else:
    arrays['ffw_norm'] = norm('post_attention_layernorm')
  return arrays | gemma4.extras(get, c, prefix) if c.gemma4 else arrays


def as_rotated(
  heads: list[np.ndarray], config: ModelConfig, axis: int
) -> list[np.ndarray]:
  """Returns q, k and v with `axis`, head_dim, in the order of rotations."""
  if config.family != llama4.FAMILY:
    return heads
  return [*(llama4.rotated_halves(x, axis) for x in heads[:2]), heads[2]]


def _feed_forward(
  get: Callable[..., np.ndarray], config: ModelConfig, layer: int, start: str
) -> Params:
  """Returns the matrices behind the attention; see `param_specs`."""
  c, is_llama4, prefix = config, config.family == llama4.FAMILY, start
  start += 'feed_forward' if is_llama4 else 'mlp'

  def linear(name, num_out, num_in):
    return get(f'{start}.{name}.weight', num_out, num_in)

  def dense(ffw_dim, part='', own_prefix=''):
    gate = linear(f'{part}gate_proj', ffw_dim, c.embed_dim)
    up = linear(f'{part}up_proj', ffw_dim, c.embed_dim)
    down = linear(f'{part}down_proj', c.embed_dim, ffw_dim)
    return {
      # [2, F, D] -> [D, 2, F]
      f'{own_prefix}gate_up': Joined([gate[None], up[None]], 0, (2, 0, 1)),
      f'{own_prefix}down': down.T,
    }

  if not c.has_experts(layer):
    return dense(c.ffw_dim)
  if c.experts.is_beside_dense:
    return dense(c.ffw_dim) | gemma4.experts(get, c, prefix)
  if c.family == 'gpt_oss':
    return _gpt_oss_experts(get, c, start)
  if is_llama4:
    shared = dense(c.expert_ffw_dim, 'shared_expert.', 'shared_')
    return {**llama4.experts(get, c, start), **shared}
  sizes = c.experts

  def stacked(name, num_out, num_in):
    matrices = [
      linear(f'experts.{i}.{name}', num_out, num_in)[None]
      for i in range(sizes.num_experts)
    ]
    return Joined(matrices, 0, (0, 2, 1))

  return {
    'router': linear('gate', sizes.num_experts, c.embed_dim),
    'experts_gate': stacked('gate_proj', sizes.ffw_dim, c.embed_dim),
    'experts_up': stacked('up_proj', sizes.ffw_dim, c.embed_dim),
    'experts_down': stacked('down_proj', c.embed_dim, sizes.ffw_dim),
  }


def _gpt_oss_experts(
  get: Callable[..., np.ndarray], config: ModelConfig, start: str
) -> Params:
  """Returns the experts of gpt-oss; gate and up take turns in one tensor."""
  num, ffw = config.num_experts, config.expert_ffw_dim
  embed = config.embed_dim
  gate_up, down = (f'{start}.experts.{x}_proj' for x in ('gate_up', 'down'))
  matrices = get(gate_up, num, embed, 2 * ffw)
  biases = get(f'{gate_up}_bias', num, 2 * ffw)
  return {
    'router': get(f'{start}.router.weight', num, embed),
    'router_bias': get(f'{start}.router.bias', num),
    'experts_gate': matrices[..., ::2],
    'experts_gate_bias': biases[..., ::2],
    'experts_up': matrices[..., 1::2],
    'experts_up_bias': biases[..., 1::2],
    'experts_down': get(down, num, ffw, embed),
    'experts_down_bias': get(f'{down}_bias', num, embed),
  }
