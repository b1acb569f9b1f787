"""Model families: Hugging Face configurations and parameter names.

Everything a family changes lies here: how its `config.json` becomes a
ModelConfig and how its named tensors become the parameter tree.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig, RopeScaling
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.params import Params

# Puts a part of the parameters, described by the specs, on the devices.
Place = Callable[[Params, Params], Params]

FAMILIES = ('llama', 'mistral', 'qwen2', 'qwen3', 'gemma3_text')

# Only those that the family has: elsewhere such an entry means nothing.
_UNSUPPORTED_OPTIONS = {
  'llama': ('attention_bias', 'mlp_bias'),
  'mistral': (),
  'qwen2': (),
  'qwen3': ('attention_bias',),
  'gemma3_text': (
    'attention_bias',
    'attn_logit_softcapping',
    'final_logit_softcapping',
    'use_bidirectional_attention',
  ),
}
_NUM_THREADS = 8  # that read layers; each holds one in memory
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """Translates a complete Hugging Face configuration (transformers 5 form).

  Args:
    values: `transformers.PretrainedConfig.to_dict()`.

  Raises:
    UserError: a family, activation or option that the decoder lacks.
  """
  family = values.get('model_type')
  if family not in FAMILIES:
    raise errors.UserError(
      f'unknown architecture {family!r}; supported: {", ".join(FAMILIES)}'
    )
  _refuse_unsupported(values)
  is_gemma = family == 'gemma3_text'
  activation = values['hidden_activation' if is_gemma else 'hidden_act']
  if activation not in _ACTIVATIONS:
    raise errors.UserError(
      f'unknown activation {activation!r}; supported: {", ".join(_ACTIVATIONS)}'
    )
  rope = values['rope_parameters']
  global_rope = rope['full_attention'] if is_gemma else rope
  num_heads = values['num_attention_heads']
  return ModelConfig(
    family=family,
    vocab_size=values['vocab_size'],
    num_layers=values['num_hidden_layers'],
    embed_dim=values['hidden_size'],
    num_heads=num_heads,
    num_kv_heads=values['num_key_value_heads'],
    head_dim=values.get('head_dim') or values['hidden_size'] // num_heads,
    ffw_dim=values['intermediate_size'],
    max_context=values['max_position_embeddings'],
    eos_token_ids=_as_tuple(values.get('eos_token_id')),
    norm_eps=values['rms_norm_eps'],
    rope_theta=global_rope['rope_theta'],
    rope_scaling=_rope_scaling(global_rope),
    tie_embeddings=values['tie_word_embeddings'],
    activation=_ACTIVATIONS[activation],
    use_qkv_bias=family == 'qwen2',
    use_qk_norm=family in ('qwen3', 'gemma3_text'),
    use_post_norms=is_gemma,
    embed_scale=values['hidden_size'] ** 0.5 if is_gemma else 1.0,
    query_scale=values['query_pre_attn_scalar'] ** -0.5 if is_gemma else None,
    **_sliding(values),
    local_rope_theta=(
      rope['sliding_attention']['rope_theta'] if is_gemma else None
    ),
  )


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
  family_options = _UNSUPPORTED_OPTIONS[values['model_type']]
  for option in ('quantization_config', *family_options):
    if values.get(option):
      raise errors.UserError(
        f'{option}={values[option]!r} is not supported for '
        f'{values["model_type"]}'
      )


def _as_tuple(token_ids: int | list[int] | None) -> tuple[int, ...]:
  if token_ids is None:
    return ()
  return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
  kind = rope.get('rope_type', 'default')
  if kind == 'default':
    return None
  if kind == 'linear':
    return RopeScaling(kind='linear', factor=rope['factor'])
  if kind == 'llama3':
    return RopeScaling(
      kind='llama3',
      factor=rope['factor'],
      low_freq_factor=rope['low_freq_factor'],
      high_freq_factor=rope['high_freq_factor'],
      original_max_context=rope['original_max_position_embeddings'],
    )
  raise errors.UserError(
    f'unknown rope scaling {kind!r}; supported: default, linear, llama3'
  )


def _sliding(values: Mapping[str, Any]) -> dict[str, Any]:
  """The window, and the layers it holds for."""
  window = values.get('sliding_window')
  family = values['model_type']
  if window is None or family == 'llama':
    return {}
  if family == 'mistral':
    return {'sliding_window': window}
  layers = tuple(kind == 'sliding_attention' for kind in values['layer_types'])
  if not any(layers):
    return {}
  return {'sliding_window': window, 'sliding_layers': layers}


def params_from_hf(
  get: Callable[[str], np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  place: Place,
) -> Params:
  """Assembles the parameter tree from tensors with Hugging Face names.

  Args:
    get: returns the tensor of a name; raises UserError when it is missing.
      Called from several threads.
    config: of the model.
    norm_offset: added to norm scales (1 where the checkpoint stores them
      relative to one, as Gemma's do).
    place: puts a part of the tree on the devices as soon as it is read.

  Returns:
    What `place` makes of the tree of `params.param_specs(config)`.
  """
  c = config
  get = functools.partial(_get_checked, get)
  specs = params_lib.param_specs(c)
  names = {'embedding': 'model.embed_tokens.weight'}
  if not c.tie_embeddings:
    names['unembedding'] = 'lm_head.weight'
  final_norm = get('model.norm.weight', c.embed_dim)
  final_norm = final_norm.astype(np.float32) + norm_offset

  def table(key: str) -> Params:
    return place(get(names[key], c.vocab_size, c.embed_dim), specs[key])

  def layer(i: int) -> Params:
    arrays = _layer_from_hf(get, c, norm_offset, f'model.layers.{i}.')
    return place(arrays, specs['layers'][i])

  with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
    # The largest first.
    tables = pool.map(table, names)
    layers = pool.map(layer, range(c.num_layers))
    return {
      **dict(zip(names, tables, strict=True)),
      'layers': list(layers),
      'final_norm': place(final_norm, specs['final_norm']),
    }


def _get_checked(
  get: Callable[[str], np.ndarray], name: str, *shape: int
) -> np.ndarray:
  array = get(name)
  if array.shape != shape:
    raise errors.UserError(
      f'tensor {name} has shape {array.shape}, the config says {shape}: '
      'weights and config do not belong together'
    )
  return array


def _layer_from_hf(
  get: Callable[..., np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  prefix: str,
) -> Params:
  """Returns the unpadded numpy arrays of one layer.

  Those that are transposed are views: numpy takes long to transpose, JAX does
  not.
  """
  c = config
  num_heads = {'q': c.num_heads, 'k': c.num_kv_heads, 'v': c.num_kv_heads}
  # Sorted by the kv head that they belong to.
  grouped = (c.num_kv_heads, -1, c.head_dim)

  def norm(name, size=c.embed_dim):
    array = get(f'{prefix}{name}.weight', size)
    return array.astype(np.float32) + norm_offset

  def linear(name, num_out, num_in):
    return get(f'{prefix}{name}.weight', num_out, num_in)

  def heads(kind, *inputs):
    arrays = [
      get(f'{prefix}self_attn.{name}_proj.{kind}', count * c.head_dim, *inputs)
      for name, count in num_heads.items()
    ]
    grouped_arrays = [array.reshape(*grouped, *inputs) for array in arrays]
    return np.concatenate(grouped_arrays, axis=1)

  out = linear('self_attn.o_proj', c.embed_dim, c.num_heads * c.head_dim)
  gate = linear('mlp.gate_proj', c.ffw_dim, c.embed_dim)
  up = linear('mlp.up_proj', c.ffw_dim, c.embed_dim)
  arrays = {
    'attention_norm': norm('input_layernorm'),
    # [G, Q + 2, E, D] -> [D, G, Q + 2, E]
    'qkv': np.moveaxis(heads('weight', c.embed_dim), -1, 0),
    # [D, heads * E] -> [G, Q, E, D]
    'attention_out': out.T.reshape(*grouped, c.embed_dim),
    # [2, F, D] -> [D, 2, F]
    'gate_up': np.moveaxis(np.stack([gate, up]), -1, 0),
    'down': linear('mlp.down_proj', c.embed_dim, c.ffw_dim).T,
  }
  if c.use_qkv_bias:
    arrays['qkv_bias'] = heads('bias')
  if c.use_qk_norm:
    arrays['query_norm'] = norm('self_attn.q_norm', c.head_dim)
    arrays['key_norm'] = norm('self_attn.k_norm', c.head_dim)
  if c.use_post_norms:
    arrays['post_attention_norm'] = norm('post_attention_layernorm')
    arrays['ffw_norm'] = norm('pre_feedforward_layernorm')
    arrays['post_ffw_norm'] = norm('post_feedforward_layernorm')
  else:
    arrays['ffw_norm'] = norm('post_attention_layernorm')
  return arrays
