"""Reads .gguf files: configuration, dequantized weights, tokenizer metadata."""

import pathlib
from typing import Any

import gguf
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig, RopeScaling
from swiftspec_jax.models import families, layers
from swiftspec_jax.models.params import Params

# GGUF architecture -> family. Llama files also hold Mistral and SmolLM.
_FAMILIES = {
  'llama': 'llama',
  'qwen2': 'qwen2',
  'qwen3': 'qwen3',
  'gemma3': 'gemma3_text',
}

_LAYER_NAMES = {
  'input_layernorm': 'attn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'self_attn.q_norm': 'attn_q_norm',
  'self_attn.k_norm': 'attn_k_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
  'pre_feedforward_layernorm': 'ffn_norm',
  'post_feedforward_layernorm': 'post_ffw_norm',
}
_GLOBAL_NAMES = {
  'model.embed_tokens.weight': 'token_embd.weight',
  'model.norm.weight': 'output_norm.weight',
  'lm_head.weight': 'output.weight',
}


class GGUFFile:
  """An open .gguf file."""

  def __init__(self, path: pathlib.Path):
    """Opens the file.

    Raises:
      UserError: the file is no GGUF file, is cut short, or holds an
        architecture that the decoder lacks.
    """
    self._path = path
    try:
      reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
      raise errors.UserError(
        f'{path} is not a complete GGUF file ({error}); download it again'
      ) from error
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}
    self.metadata = {key: f.contents() for key, f in reader.fields.items()}
    self._architecture = self.metadata['general.architecture']
    if self._architecture not in _FAMILIES:
      raise errors.UserError(
        f'{path}: unknown architecture {self._architecture!r}; supported: '
        f'{", ".join(_FAMILIES)}'
      )

  def _get(self, key: str, default: Any = None) -> Any:
    key = f'{self._architecture}.{key}'
    if default is None and key not in self.metadata:
      raise errors.UserError(f'{self._path}: the metadata lack {key}')
    return self.metadata.get(key, default)

  def config(self) -> ModelConfig:
    """Returns the model's configuration."""
    family = _FAMILIES[self._architecture]
    is_gemma = family == 'gemma3_text'
    num_heads = self._get('attention.head_count')
    num_layers = self._get('block_count')
    embed_dim = self._get('embedding_length')
    head_dim = self._get('attention.key_length', embed_dim // num_heads)
    rope_theta = self._get('rope.freq_base', 10_000.0)
    return ModelConfig(
      family=family,
      vocab_size=len(self.metadata['tokenizer.ggml.tokens']),
      num_layers=num_layers,
      embed_dim=embed_dim,
      num_heads=num_heads,
      num_kv_heads=self._get('attention.head_count_kv', num_heads),
      head_dim=head_dim,
      ffw_dim=self._get('feed_forward_length'),
      max_context=self._get('context_length'),
      eos_token_ids=self._eos_token_ids(),
      norm_eps=self._get('attention.layer_norm_rms_epsilon'),
      rope_theta=rope_theta,
      rope_scaling=self._rope_scaling(head_dim, rope_theta),
      tie_embeddings='output.weight' not in self._tensors,
      activation='gelu_tanh' if is_gemma else 'silu',
      use_qkv_bias='blk.0.attn_q.bias' in self._tensors,
      use_qk_norm=family in ('qwen3', 'gemma3_text'),
      use_post_norms=is_gemma,
      embed_scale=embed_dim**0.5 if is_gemma else 1.0,
      **(self._gemma_windows(num_layers) if is_gemma else {}),
    )

  def _gemma_windows(self, num_layers: int) -> dict[str, Any]:
    # The files do not name the pattern: every sixth layer is global
    # (Gemma 3 technical report, section 2).
    return {
      'sliding_window': self._get('attention.sliding_window'),
      'sliding_layers': tuple((i + 1) % 6 != 0 for i in range(num_layers)),
      'local_rope_theta': 10_000.0,
    }

  def _rope_scaling(self, head_dim: int, theta: float) -> RopeScaling | None:
    if 'rope_freqs.weight' in self._tensors:
      # Llama 3.1: the file holds the divisors, the largest is the factor.
      divisors = np.asarray(self._tensors['rope_freqs.weight'].data)
      scaling = RopeScaling(kind='llama3', factor=float(divisors.max()))
      plain = layers.rope_frequencies(head_dim, theta, None)
      scaled = layers.rope_frequencies(head_dim, theta, scaling)
      if not np.allclose(plain / divisors, scaled, rtol=1e-3):
        raise errors.UserError(
          f'{self._path}: rope_freqs.weight is not the Llama 3.1 scaling'
        )
      return scaling
    kind = self._get('rope.scaling.type', 'none')
    if kind == 'none':
      return None
    if kind != 'linear':
      raise errors.UserError(
        f'{self._path}: unknown rope scaling {kind!r}; supported: linear'
      )
    return RopeScaling(kind='linear', factor=self._get('rope.scaling.factor'))

  def _eos_token_ids(self) -> tuple[int, ...]:
    keys = ('eos_token_id', 'eot_token_id', 'eom_token_id')
    ids = (self.metadata.get(f'tokenizer.ggml.{key}') for key in keys)
    return tuple(dict.fromkeys(i for i in ids if i is not None))

  def params(self, config: ModelConfig) -> Params:
    """Returns the dequantized parameter tree, float32 numpy arrays."""
    # The file stores Gemma's norm scales with the one already added.
    return families.params_from_hf(
      lambda name: self._tensor(name, config), config, norm_offset=0.0
    )

  def _tensor(self, hf_name: str, config: ModelConfig) -> np.ndarray:
    name = _gguf_name(hf_name, config.use_post_norms)
    if name not in self._tensors:
      raise errors.UserError(f'{self._path}: tensor {name} is missing')
    tensor = self._tensors[name]
    try:
      array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise errors.UserError(
        f'{self._path}: {name} has type {tensor.tensor_type.name}, which the '
        'gguf package cannot dequantize'
      ) from error
    if self._architecture == 'llama' and 'attn_' in name:
      if name.endswith(('attn_q.weight', 'attn_k.weight')):
        array = _unpermute(array, config.head_dim)
    return array


def _gguf_name(hf_name: str, use_post_norms: bool) -> str:
  """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
  if hf_name in _GLOBAL_NAMES:
    return _GLOBAL_NAMES[hf_name]
  _, _, layer, name = hf_name.split('.', 3)
  name, kind = name.rsplit('.', 1)
  if name == 'post_attention_layernorm':
    # Gemma's norm behind the attention; elsewhere the one before the FFW.
    name = 'post_attention_norm' if use_post_norms else 'ffn_norm'
  else:
    name = _LAYER_NAMES[name]
  return f'blk.{layer}.{name}.{kind}'


def _unpermute(array: np.ndarray, head_dim: int) -> np.ndarray:
  """Undoes llama.cpp's order: it interleaves the two rotary halves."""
  rows = array.reshape(-1, head_dim // 2, 2, *array.shape[1:])
  return np.swapaxes(rows, 1, 2).reshape(array.shape)
