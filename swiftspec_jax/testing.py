"""Models for tests and notebooks that need no download and no torch.

`write_tiny_checkpoint` writes checkpoints of every family, whose weights are
the same everywhere. `table_model` makes a model whose law is a table that a
reader can check by hand. `random_model` makes one of any configuration.
"""

import dataclasses
import json
import math
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tokenizers
import transformers
from safetensors import numpy as safetensors_numpy
from tokenizers import decoders, models, pre_tokenizers

from swiftspec_jax import errors, sharding
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models import families, gemma4
from swiftspec_jax.models import params as params_lib

_NUM_BYTES = 256
_SPECIAL_TOKENS = (
  '<bos>',
  '<eos>',
  '<pad>',
  '<|system|>',
  '<|user|>',
  '<|assistant|>',
)
_BOS, _EOS = _NUM_BYTES, _NUM_BYTES + 1
_CHAT_TEMPLATE = (
  '<bos>{% for message in messages %}'
  "<|{{ message['role'] }}|>{{ message['content'] }}<eos>"
  '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
)
# What a table's probability of zero becomes; its exponential is zero.
_LOG_ZERO = -1e4

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
  'bos_token_id': _BOS,
  'eos_token_id': _EOS,
  'torch_dtype': 'float32',
}
_CHANGES = {
  'llama': {'model_type': 'llama'},
  'llama3': {
    'model_type': 'llama',
    'rope_scaling': {
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      # Of the four frequencies one is kept, one blended, two stretched.
      'original_max_position_embeddings': 128,
    },
  },
  'mistral': {'model_type': 'mistral', 'sliding_window': 16},
  'qwen2': {'model_type': 'qwen2', 'tie_word_embeddings': True},
  'qwen3': {
    'model_type': 'qwen3',
    'head_dim': 16,
    'tie_word_embeddings': True,
  },
  'qwen3_moe': {
    'model_type': 'qwen3_moe',
    'num_hidden_layers': 3,
    'head_dim': 16,
    'num_experts': 6,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 20,
    'norm_topk_prob': True,
    'mlp_only_layers': [1],
  },
  'gpt_oss': {
    'model_type': 'gpt_oss',
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
    'rope_scaling': {
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 128,
    },
  },
  'gemma3_text': {
    'model_type': 'gemma3_text',
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
    'model_type': 'gemma4_text',
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

_WITH_HEAD_NORMS = 'qwen3', 'qwen3_moe', 'gemma3_text', *gemma4.FAMILIES
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
  """
  if family not in _CHANGES:
    raise errors.UserError(
      f'unknown family {family!r}; choose one of {", ".join(TINY_FAMILIES)}'
    )
  config = {**_COMMON, **_CHANGES[family], **overrides}
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(config, indent=2))
  dtype = getattr(ml_dtypes, config['torch_dtype'], config['torch_dtype'])
  norm_mean = 1 - families.FAMILIES[config['model_type']].norm_offset
  weights = {
    name: _weights(name, shape, seed, norm_mean).astype(dtype)
    for name, shape in _tensor_shapes(config)
  }
  _write_weights(directory, weights, num_files)
  byte_tokenizer(config['vocab_size']).save_pretrained(directory)


def _tensor_shapes(
  config: dict[str, Any],
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Yields names and shapes as transformers has them."""
  c = config
  embed = c['hidden_size']
  yield 'model.embed_tokens.weight', (c['vocab_size'], embed)
  yield 'model.norm.weight', (embed,)
  if not c['tie_word_embeddings']:
    yield 'lm_head.weight', (c['vocab_size'], embed)
  norms = ['input_layernorm', 'post_attention_layernorm']
  if c['model_type'] in ('gemma3_text', *gemma4.FAMILIES):
    norms += ['pre_feedforward_layernorm', 'post_feedforward_layernorm']
  if c['model_type'] in gemma4.FAMILIES:
    yield from _gemma4_shapes(c)
  for i in range(c['num_hidden_layers']):
    prefix = f'model.layers.{i}'
    for name in norms:
      yield f'{prefix}.{name}.weight', (embed,)
    yield from _attention_shapes(c, i)
    yield from _feed_forward_shapes(c, i)


def _attention_shapes(
  config: dict[str, Any], layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
  c, prefix = config, f'model.layers.{layer}.self_attn'
  embed = c['hidden_size']
  num_heads, num_kv_heads = c['num_attention_heads'], c['num_key_value_heads']
  head_dim = c.get('head_dim') or embed // num_heads
  names = ['q', 'k', 'v']
  if 'global_head_dim' in c and c['layer_types'][layer] == 'full_attention':
    head_dim = c['global_head_dim']
    if c.get('attention_k_eq_v'):
      num_kv_heads, names = c['num_global_key_value_heads'], ['q', 'k']
  if layer >= c['num_hidden_layers'] - c.get('num_kv_shared_layers', 0):
    names = ['q']
  for name in names:
    size = (num_heads if name == 'q' else num_kv_heads) * head_dim
    yield f'{prefix}.{name}_proj.weight', (size, embed)
    if c['model_type'] == 'qwen2' or c.get('attention_bias'):
      yield f'{prefix}.{name}_proj.bias', (size,)
    if c['model_type'] in _WITH_HEAD_NORMS and name != 'v':
      yield f'{prefix}.{name}_norm.weight', (head_dim,)
  yield f'{prefix}.o_proj.weight', (embed, num_heads * head_dim)
  if c['model_type'] == 'gpt_oss':
    yield f'{prefix}.o_proj.bias', (embed,)
    yield f'{prefix}.sinks', (num_heads,)


def _gemma4_shapes(
  config: dict[str, Any],
) -> Iterator[tuple[str, tuple[int, ...]]]:
  c = config
  embed, num_layers = c['hidden_size'], c['num_hidden_layers']
  width = c.get('hidden_size_per_layer_input')
  if width:
    start, all_widths = 'model', num_layers * width
    table = f'{start}.embed_tokens_per_layer.weight'
    yield table, (c['vocab_size_per_layer_input'], all_widths)
    yield f'{start}.per_layer_model_projection.weight', (all_widths, embed)
    yield f'{start}.per_layer_projection_norm.weight', (width,)
  for i in range(num_layers):
    prefix = f'model.layers.{i}'
    yield f'{prefix}.layer_scalar', (1,)
    if width:
      yield f'{prefix}.per_layer_input_gate.weight', (width, embed)
      yield f'{prefix}.per_layer_projection.weight', (embed, width)
      yield f'{prefix}.post_per_layer_input_norm.weight', (embed,)
    if c.get('enable_moe_block'):
      num, ffw = c['num_experts'], c['moe_intermediate_size']
      yield f'{prefix}.router.proj.weight', (num, embed)
      yield f'{prefix}.router.scale', (embed,)
      yield f'{prefix}.router.per_expert_scale', (num,)
      yield f'{prefix}.experts.gate_up_proj', (num, 2 * ffw, embed)
      yield f'{prefix}.experts.down_proj', (num, embed, ffw)
      for name in ('pre_2', 'post_1', 'post_2'):
        place, number = name.split('_')
        norm = f'{place}_feedforward_layernorm_{number}'
        yield f'{prefix}.{norm}.weight', (embed,)


def _feed_forward_shapes(
  config: dict[str, Any], layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
  c, prefix = config, f'model.layers.{layer}.mlp'
  embed, parts = c['hidden_size'], {prefix: c['intermediate_size']}
  first_shared = c['num_hidden_layers'] - c.get('num_kv_shared_layers', 0)
  if c.get('use_double_wide_mlp') and layer >= first_shared:
    parts = {prefix: 2 * c['intermediate_size']}
  if c['model_type'] == 'llama4_text':
    prefix = f'model.layers.{layer}.feed_forward'
    parts = {prefix: c['intermediate_size_mlp']}
    if layer in c['moe_layers']:
      num, ffw = c['num_local_experts'], c['intermediate_size']
      yield f'{prefix}.router.weight', (num, embed)
      yield f'{prefix}.experts.gate_up_proj', (num, embed, 2 * ffw)
      yield f'{prefix}.experts.down_proj', (num, ffw, embed)
      parts = {f'{prefix}.shared_expert': ffw}
  if c['model_type'] == 'gpt_oss':
    num, ffw = c['num_local_experts'], c['intermediate_size']
    yield f'{prefix}.router.weight', (num, embed)
    yield f'{prefix}.router.bias', (num,)
    yield f'{prefix}.experts.gate_up_proj', (num, embed, 2 * ffw)
    yield f'{prefix}.experts.gate_up_proj_bias', (num, 2 * ffw)
    yield f'{prefix}.experts.down_proj', (num, ffw, embed)
    yield f'{prefix}.experts.down_proj_bias', (num, embed)
    return
  is_period = (layer + 1) % c.get('decoder_sparse_step', 1) == 0
  is_dense = layer in c.get('mlp_only_layers', ())
  if c['model_type'] == 'qwen3_moe' and is_period and not is_dense:
    yield f'{prefix}.gate.weight', (c['num_experts'], embed)
    parts = {
      f'{prefix}.experts.{j}': c['moe_intermediate_size']
      for j in range(c['num_experts'])
    }
  for part, ffw in parts.items():
    for name in ('gate', 'up'):
      yield f'{part}.{name}_proj.weight', (ffw, embed)
    yield f'{part}.down_proj.weight', (embed, ffw)


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


def byte_tokenizer(
  vocab_size: int = 272,
) -> transformers.PreTrainedTokenizerFast:
  """Returns a tokenizer with a token for each byte, and a chat template.

  Ids 0 to 255 are the bytes, then come special tokens: BOS, EOS, padding,
  three roles, and reserved ones up to `vocab_size`.
  """
  least = _NUM_BYTES + len(_SPECIAL_TOKENS)
  if vocab_size < least:
    raise errors.UserError(
      f'vocab_size must be at least {least}, got {vocab_size}'
    )
  reserved = [f'<reserved_{i}>' for i in range(vocab_size - least)]
  # Printable bytes are spelled as themselves, the others by higher characters
  # in their order.
  alphabet = sorted(map(ord, pre_tokenizers.ByteLevel.alphabet()))
  others = (byte for byte in range(_NUM_BYTES) if byte not in alphabet)
  vocabulary = {
    chr(code): code if code < _NUM_BYTES else next(others) for code in alphabet
  }
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([*_SPECIAL_TOKENS, *reserved])
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    bos_token='<bos>',
    eos_token='<eos>',
    pad_token='<pad>',
    chat_template=_CHAT_TEMPLATE,
    clean_up_tokenization_spaces=False,
  )


def table_model(
  table: np.ndarray,
  *,
  name: str = 'table',
  eos_token_ids: Sequence[int] = (),
  max_context: int = 1024,
  devices: Sequence[jax.Device] | None = None,
) -> Model:
  """Returns a model whose next-token law is a table.

  It is a decoder without layers: the embedding is one-hot and the
  unembedding holds the logarithms. Its tokens are the letters a, b, c, ...

  Args:
    table: f[V, V] probabilities; row i is the law of the token behind token
      i. Logits are the logarithms, that of zero is -1e4.
    name: name for messages and results.
    eos_token_ids: tokens that end an output.
    max_context: token limit, prompt and output together.
    devices: same as in `swiftspec_jax.load`.

  Raises:
    UserError: the table is not square, or a row is no probability law.
  """
  table = np.asarray(table, np.float64)
  if table.ndim != 2 or table.shape[0] != table.shape[1]:
    raise errors.UserError(f'the table must be square, got {table.shape}')
  if (table < 0).any() or not np.allclose(table.sum(axis=1), 1):
    raise errors.UserError(
      f'each row of the table must sum to 1, got {table.sum(axis=1)}'
    )
  # A power of two as the scale, so that norm and product round nothing.
  scale = 2
  while scale**2 < len(table):
    scale *= 2
  mesh = sharding.make_mesh(devices)
  config = ModelConfig(
    family='llama',
    vocab_size=len(table),
    num_layers=0,
    embed_dim=scale**2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    ffw_dim=1,
    max_context=max_context,
    eos_token_ids=tuple(eos_token_ids),
    norm_eps=1e-12,
    tie_embeddings=False,
    num_shards=mesh.devices.size,
  )
  arrays = _table_params(table, scale)
  specs = params_lib.param_specs(config)
  return Model(
    name=name,
    config=config,
    params=params_lib.place_params(arrays, specs, jnp.float32, mesh),
    dtype=jnp.dtype(jnp.float32),
    mesh=mesh,
    tokenizer=_letters(len(table)),
  )


def _table_params(table: np.ndarray, scale: int) -> params_lib.Params:
  shape = (len(table), scale**2)
  with np.errstate(divide='ignore'):
    logs = np.maximum(np.log(table), _LOG_ZERO)
  unembedding = np.zeros(shape, np.float32)
  unembedding[:, : len(table)] = logs.T / scale
  return {
    # One-hot of root mean square one: the norm keeps it as it is.
    'embedding': np.eye(*shape, dtype=np.float32) * np.float32(scale),
    'layers': [],
    'final_norm': np.ones(scale**2, np.float32),
    'unembedding': unembedding,
  }


def _letters(size: int) -> transformers.PreTrainedTokenizerFast:
  """A tokenizer whose tokens are a, b, c, ..."""
  letters = [c for c in map(chr, range(ord('a'), 0x30000)) if c.isalpha()]
  vocabulary = {letter: i for i, letter in enumerate(letters[:size])}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  backend.decoder = decoders.Fuse()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, clean_up_tokenization_spaces=False
  )


def random_model(
  config: ModelConfig,
  *,
  seed: int = 0,
  name: str = 'random',
  dtype: jax.typing.DTypeLike = jnp.float32,
  devices: Sequence[jax.Device] | None = None,
  sequence_devices: int = 1,
) -> Model:
  """Returns a model with random weights and a byte tokenizer.

  Args:
    config: configuration with a vocabulary of at least 262 tokens.
    seed: seed of the weights, which are the same for any number of devices.
    name: name for messages and results.
    dtype: dtype of weights and cache.
    devices: same as in `swiftspec_jax.load`.
    sequence_devices: same as in `swiftspec_jax.load`.
  """
  mesh = sharding.make_mesh(devices, sequence_devices)
  config = dataclasses.replace(
    config,
    num_shards=mesh.devices.size,
    num_sequence_shards=sequence_devices,
  )
  return Model(
    name=name,
    config=config,
    params=params_lib.random_params(jax.random.key(seed), config, dtype, mesh),
    dtype=jnp.dtype(dtype),
    mesh=mesh,
    tokenizer=byte_tokenizer(config.vocab_size),
  )
