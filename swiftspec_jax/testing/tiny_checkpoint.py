"""Small random checkpoints of every family, the same on every machine."""

import json
import math
import pathlib
import zlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import numpy as safetensors_numpy

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import hf
from swiftspec_jax.models import families
from swiftspec_jax.testing.byte_tokenizer import BOS, EOS, byte_tokenizer

_COMMON = {
  'vocab_size': 272,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 48,
  'max_position_embeddings': 1024,
  'rms_norm_eps': 1e-5,
  'rope_theta': 10_000.0,
  'tie_word_embeddings': False,
  'bos_token_id': BOS,
  'eos_token_id': EOS,
  'torch_dtype': 'float32',
}
_LLAMA3_ROPE = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  # Of the four frequencies one is kept, one blended, two stretched.
  'original_max_position_embeddings': 128,
}
# By family; its model type has the same name if it is not here.
_CHANGES = {
  'llama': {},
  'llama3': {'model_type': 'llama', 'rope_scaling': _LLAMA3_ROPE},
  'mistral': {'sliding_window': 16},
  'qwen2': {'tie_word_embeddings': True},
  'qwen3': {'head_dim': 16, 'tie_word_embeddings': True},
  'qwen3_moe': {
    'num_hidden_layers': 3,
    'head_dim': 16,
    'num_experts': 6,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 20,
    'norm_topk_prob': True,
    'mlp_only_layers': [1],
  },
  'gpt_oss': {
    'head_dim': 16,
    'intermediate_size': 20,
    'num_local_experts': 6,
    'num_experts_per_tok': 3,
    'attention_bias': True,
    'sliding_window': 16,
    'layer_types': ['sliding_attention', 'full_attention'],
    # So low that it binds.
    'swiglu_limit': 0.7,
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 8.0,
      'beta_fast': 32.0,
      'beta_slow': 1.0,
      'truncate': False,
      # Of the eight frequencies one is kept, two blended, five stretched.
      'original_max_position_embeddings': 128,
    },
  },
  'llama4': {
    'model_type': 'llama4_text',
    'num_hidden_layers': 3,
    'head_dim': 8,
    # Of two layers with chunks, one has experts.
    'no_rope_layers': [1, 0, 1],
    'moe_layers': [1, 2],
    'intermediate_size': 20,
    'intermediate_size_mlp': 48,
    'num_local_experts': 6,
    'num_experts_per_tok': 1,
    'attention_chunk_size': 26,
    'floor_scale': 5,
    'attn_scale': 0.3,
    'rope_scaling': _LLAMA3_ROPE,
  },
  'gemma3_text': {
    'num_hidden_layers': 3,
    'layer_types': [
      'sliding_attention',
      'full_attention',
      'sliding_attention',
    ],
    'sliding_window': 16,
    'head_dim': 16,
    'query_pre_attn_scalar': 12,
    'rope_theta': 1_000_000.0,
    'rope_local_base_freq': 10_000.0,
    'tie_word_embeddings': True,
    'hidden_activation': 'gelu_pytorch_tanh',
  },
  'gemma4_text': {
    'num_hidden_layers': 3,
    'layer_types': [
      'sliding_attention',
      'full_attention',
      'full_attention',
    ],
    'sliding_window': 16,
    'head_dim': 16,
    'global_head_dim': 24,
    'num_global_key_value_heads': 1,
    'attention_k_eq_v': True,
    'rope_parameters': {
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 10_000.0},
      'full_attention': {
        'rope_type': 'proportional',
        'partial_rotary_factor': 0.25,
        'rope_theta': 1_000_000.0,
      },
    },
    'hidden_size_per_layer_input': 0,
    # So low that it binds.
    'final_logit_softcapping': 3.0,
    'tie_word_embeddings': True,
    'hidden_activation': 'gelu_pytorch_tanh',
  },
}

# Ends of the names of what multiplies activations.
_SCALES = 'norm.weight', 'norm_1.weight', 'norm_2.weight', 'scale', 'scalar'
TINY_FAMILIES = tuple(_CHANGES)


def write_tiny_checkpoint(
  directory: pathlib.Path,
  family: str = 'llama',
  *,
  seed: int = 0,
  num_files: int = 1,
  **overrides: Any,
) -> None:
  """Writes a small random model in Hugging Face layout.

  Each weight depends on `seed`, its name and its shape alone, and is the same
  on every machine. So a checkpoint with fewer layers (`num_hidden_layers=1`)
  and the same seed drafts tolerably for the full one.

  Args:
    directory: folder to write; made if it does not exist.
    family: one of `TINY_FAMILIES`; 'llama3' is llama with the rotary scaling
      of Llama 3.1.
    seed: seed of the weights.
    num_files: safetensors files; with more than one there is an index.
    **overrides: entries of config.json. `torch_dtype` is also that of the
      stored weights; the vocabulary is filled up with reserved tokens.

  Raises:
    UserError: an unknown family, or a config.json that cannot be loaded.
  """
  errors.check_known('unknown family', family, TINY_FAMILIES)
  config = {
    **_COMMON,
    'model_type': family,
    **_CHANGES[family],
    **overrides,
  }
  path = directory / 'config.json'
  shapes = _shapes(path, config)
  directory.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(config, indent=2))
  dtype = getattr(ml_dtypes, config['torch_dtype'], config['torch_dtype'])
  norm_mean = 1 - families.FAMILIES[config['model_type']].norm_offset
  weights = {
    name: _weights(name, shape, seed, norm_mean).astype(dtype)
    for name, shape in sorted(shapes.items())
  }
  _write_weights(directory, weights, num_files)
  byte_tokenizer(config['vocab_size']).save_pretrained(directory)


def _shapes(
  path: pathlib.Path, config: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the tensors that a model is read from."""
  shapes = {}

  def get(name: str, *shape: int) -> np.ndarray:
    shapes[name] = shape
    return np.broadcast_to(np.zeros((), np.float32), shape)

  model = hf.config_of(path, config)
  families.params_from_hf(get, model, 0.0, lambda arrays, specs: arrays)
  return shapes


def _weights(
  name: str, shape: tuple[int, ...], seed: int, norm_mean: float
) -> np.ndarray:
  """Returns f32 weights: uniform, with a deviation that suits their use."""
  # Raw bits are the same for every numpy, distributions need not be.
  bits = np.random.PCG64([seed, zlib.crc32(name.encode())])
  raw = bits.random_raw(math.prod(shape)).reshape(shape) >> 40
  unit = (raw / 2**24 - 0.5).astype(np.float32) * np.float32(12**0.5)
  if name.endswith(_SCALES):
    return norm_mean + 0.2 * unit
  if name.endswith('bias'):
    return 0.5 * unit
  if name.endswith('sinks'):
    return unit
  return unit / np.float32(shape[-1] ** 0.5)


def _write_weights(
  directory: pathlib.Path, weights: dict[str, np.ndarray], num_files: int
) -> None:
  if num_files == 1:
    safetensors_numpy.save_file(weights, directory / 'model.safetensors')
    return
  weight_map = {}
  for i in range(num_files):
    file = f'model-{i + 1:05}-of-{num_files:05}.safetensors'
    part = dict(list(weights.items())[i::num_files])
    safetensors_numpy.save_file(part, directory / file)
    weight_map.update(dict.fromkeys(part, file))
  index = json.dumps({'metadata': {}, 'weight_map': weight_map})
  (directory / 'model.safetensors.index.json').write_text(index)
