"""Writes EAGLE-3 heads in the layout of `speculators`, which vLLM loads.

`eagle3` reads them again. Legend: as there.
"""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint.drafts import draft_tensors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Eagle3
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models import rope_scaling
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.models.model import Model

# Release of `speculators` whose fields and tensors these are.
_VERSION = '0.9.0'
_ARCHITECTURES = {
  'llama': 'LlamaForCausalLM',
  'mistral': 'MistralForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'mimo': 'MiMoForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'qwen3_moe': 'Qwen3MoeForCausalLM',
  'gpt_oss': 'GptOssForCausalLM',
  'llama4_text': 'Llama4ForCausalLM',
  'gemma3_text': 'Gemma3ForCausalLM',
  'gemma4_text': 'Gemma4ForCausalLM',
  'gemma4_unified_text': 'Gemma4UnifiedForCausalLM',
}


def save_draft(
  draft: Model, directory: str | os.PathLike, *, target: Model
) -> None:
  """Saves an EAGLE-3 head in the layout of `speculators`, as vLLM reads it.

  Args:
    draft: head that was loaded for the target.
    directory: folder to write; made if it does not exist.
    target: model that it drafts for. Its embedding is not written again.

  Raises:
    UserError: another kind of draft, one that is sharded or quantized, another
      target, or a directory that cannot be written.
  """
  directory = pathlib.Path(directory)
  eagle3 = _check(draft, target)
  arrays = jax.tree.map(np.asarray, transposed.undone(draft.params))
  weights = _tensors(arrays, draft.config, eagle3)
  if not _shares_embedding(arrays['embedding'], target):
    weights['embed_tokens.weight'] = arrays['embedding']
  path = directory / 'model.safetensors'
  values = _config(draft, target, eagle3)
  draft_tensors.write(path, weights, values, {'format': 'pt'})


def _check(draft: Model, target: Model) -> Eagle3:
  """Returns how the head reads features."""
  config = draft.config
  if config.eagle3 is None:
    raise errors.UserError(
      f'{draft.name} is no EAGLE-3 head; speculators has no layout for it'
    )
  if config.block is not None:
    raise errors.UserError(
      f'{draft.name} drafts all tokens in one forward (P-EAGLE), and such '
      'heads are only read; copy its files'
    )
  if config.num_shards != 1 or config.weight_dtype is not None:
    raise errors.UserError(
      f'{draft.name} is on {config.num_shards} devices and its weights are '
      f'{config.weight_dtype or draft.dtype.name}; load it on one device and '
      'without weight_dtype to save it'
    )
  if config.vocab_size != target.config.vocab_size:
    raise errors.UserError(
      f'{draft.name} has {config.vocab_size} tokens and {target.name} has '
      f'{target.config.vocab_size}; name the target that it was loaded for'
    )
  return config.eagle3


def _shares_embedding(embedding: np.ndarray, target: Model) -> bool:
  every = np.asarray(draft_tensors.table_of(target, 'embedding'))
  table = every[: len(embedding)]
  return np.array_equal(embedding, table.astype(embedding.dtype))


def _tensors(
  arrays: params_lib.Params, config: ModelConfig, eagle3: Eagle3
) -> dict[str, np.ndarray]:
  """Returns [out, in] tensors by their names, but the embedding."""
  c, token_ids = config, arrays['output_token_ids']
  weights = {
    'fc.weight': arrays['feature_projection'].T,
    'norm.weight': arrays['final_norm'],
    'lm_head.weight': arrays['unembedding'],
    'd2t': token_ids.astype(np.int64) - np.arange(len(token_ids)),
    't2d': np.isin(np.arange(c.vocab_size), token_ids),
    'layers.0.hidden_norm.weight': arrays['feature_norm'],
  }
  if eagle3.norm_before_fc:
    weights['input_norm.weight'] = arrays['target_feature_norm']
  if eagle3.fc_norm:
    norms = np.split(arrays['target_feature_norm'], len(c.feature_layers))
    for i, norm in enumerate(norms):
      weights[f'fc_norm.{i}.weight'] = norm
  for i, layer in enumerate(arrays['layers']):
    for name, tensor in _layer(layer, c).items():
      weights[f'layers.{i}.{name}.weight'] = tensor
  return weights


def _layer(
  layer: params_lib.Params, config: ModelConfig
) -> dict[str, np.ndarray]:
  """Returns the tensors of a layer, as `families.layer_from_hf` reads them."""
  groups = config.num_query_groups
  # [in, G, Q + 2, E] -> [G, Q + 2, E, in]
  qkv = np.moveaxis(layer['qkv'], 0, -1)
  heads = {
    'q': qkv[:, :groups],
    'k': qkv[:, groups],
    'v': qkv[:, groups + 1],
  }
  gate, up = np.moveaxis(layer['gate_up'], 1, 0)
  tensors = {
    f'self_attn.{name}_proj': array.reshape(-1, qkv.shape[-1])
    for name, array in heads.items()
  } | {
    'self_attn.o_proj': layer['attention_out'].reshape(-1, config.embed_dim).T,
    'mlp.gate_proj': gate.T,
    'mlp.up_proj': up.T,
    'mlp.down_proj': layer['down'].T,
    'input_layernorm': layer['attention_norm'],
    'post_attention_layernorm': layer['ffw_norm'],
  }
  if config.use_qk_norm:
    tensors['self_attn.q_norm'] = layer['query_norm']
    tensors['self_attn.k_norm'] = layer['key_norm']
  return tensors


def _config(draft: Model, target: Model, eagle3: Eagle3) -> dict[str, Any]:
  c = draft.config
  architectures = [_ARCHITECTURES[target.config.family]]
  return {
    'architectures': ['Eagle3Speculator'],
    'speculators_model_type': 'eagle3',
    'speculators_version': _VERSION,
    'speculators_config': {
      'algorithm': 'eagle3',
      'default_proposal_method': 'greedy',
      'proposal_methods': [
        {'proposal_type': 'greedy', 'speculative_tokens': 5}
      ],
      'verifier': {
        'name_or_path': target.name,
        'architectures': architectures,
      },
    },
    'transformer_layer_config': _layer_config(c),
    'draft_vocab_size': c.num_logits,
    'target_hidden_size': target.config.embed_dim,
    # What goes into a layer is the output of the one before.
    'eagle_aux_hidden_state_layer_ids': [i + 1 for i in c.feature_layers],
    **dataclasses.asdict(eagle3),
    'torch_dtype': draft.dtype.name,
  }


def _layer_config(config: ModelConfig) -> dict[str, Any]:
  """Returns the sizes as config.json of a model of the family has them."""
  c = config
  return {
    'model_type': c.family,
    'vocab_size': c.vocab_size,
    'num_hidden_layers': c.num_layers,
    'hidden_size': c.embed_dim,
    'num_attention_heads': c.num_heads,
    'num_key_value_heads': c.num_kv_heads,
    'head_dim': c.head_dim,
    'intermediate_size': c.ffw_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': c.norm_eps,
    'rope_theta': c.rope_theta,
    **rope_scaling.to_hf(c),
    'tie_word_embeddings': False,
    'attention_bias': False,
  }
