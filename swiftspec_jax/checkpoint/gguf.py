"""Reads .gguf files: configuration, dequantized weights, tokenizer metadata."""

import functools
import math
import pathlib
from typing import Any

import gguf
import numpy as np

from kernels_pallas.gguf_blocks import native
from swiftspec_jax import config as config_lib
from swiftspec_jax import errors
from swiftspec_jax.checkpoint import end_tokens, gguf_header, gguf_rope
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import RopeScaling
from swiftspec_jax.models import array_parts, families, layers
from swiftspec_jax.models.matrices.stored_blocks import StoredBlocks
from swiftspec_jax.models.params import Params

# GGUF architecture -> family. Llama files also hold Mistral and SmolLM.
FAMILIES = {
  'llama': 'llama',
  'qwen2': 'qwen2',
  'qwen3': 'qwen3',
  'gemma3': 'gemma3_text',
}

TABLES = ('model.embed_tokens.weight', 'lm_head.weight')


class GGUFFile:
  """An open .gguf file."""

  def __init__(self, path: pathlib.Path):
    """Opens the file.

    Raises:
      UserError: the file is no GGUF file, is cut short, or holds an
        architecture that the decoder lacks.
    """
    self._path = path
    self.metadata, self._tensors = gguf_header.read(path)
    self._architecture = self.metadata.get('general.architecture')
    unknown = f'{path}: unknown architecture'
    errors.check_known(unknown, self._architecture, FAMILIES)

  def _get(self, key: str, default: Any = None) -> Any:
    key = f'{self._architecture}.{key}'
    value = self.metadata.get(key, default)
    if value is None:
      raise errors.UserError(f'{self._path}: the metadata lack {key}')
    if isinstance(value, list):
      raise errors.UserError(
        f'{self._path}: {key} differs between layers: {value}; that is not '
        'supported'
      )
    return value

  def config(self) -> ModelConfig:
    """Returns the model's configuration.

    Raises:
      UserError: missing metadata, or an option that the decoder lacks.
    """
    if 'blk.0.attn_output.bias' in self._tensors:
      raise errors.UserError(
        f'{self._path}: blk.0.attn_output.bias: a bias after the attention '
        'is not supported'
      )
    family = FAMILIES[self._architecture]
    is_gemma = family == 'gemma3_text'
    num_heads = self._get('attention.head_count')
    num_layers = self._get('block_count')
    embed_dim = self._get('embedding_length')
    head_dim = self._get('attention.key_length', embed_dim // num_heads)
    rope_theta = self._get('rope.freq_base', 10_000.0)
    rope_scaling, max_context = self._rope_scaling(head_dim, rope_theta)
    return ModelConfig(
      family=family,
      vocab_size=self._tensor('token_embd.weight').data.shape[0],
      num_layers=num_layers,
      embed_dim=embed_dim,
      num_heads=num_heads,
      num_kv_heads=self._get('attention.head_count_kv', num_heads),
      head_dim=head_dim,
      ffw_dim=self._get('feed_forward_length'),
      max_context=max_context,
      eos_token_ids=end_tokens.of_gguf(self.metadata),
      norm_eps=self._get('attention.layer_norm_rms_epsilon'),
      rope_theta=rope_theta,
      rope_scaling=rope_scaling,
      tie_embeddings='output.weight' not in self._tensors,
      activation='gelu_tanh' if is_gemma else 'silu',
      use_qkv_bias='blk.0.attn_q.bias' in self._tensors,
      use_qk_norm=family in ('qwen3', 'gemma3_text'),
      use_post_norms=is_gemma,
      embed_scale=embed_dim**0.5 if is_gemma else 1.0,
      **(
        self._gemma_options(num_layers, embed_dim, num_heads)
        if is_gemma
        else {}
      ),
    )

  def _gemma_options(
    self, num_layers: int, embed_dim: int, num_heads: int
  ) -> dict[str, Any]:
    # The files do not name all of these; the numbers are in the technical
    # report (section 2) and in the configurations that Google published.
    period = self._get('attention.sliding_window_pattern', 6)
    is_27b = num_layers == 62
    return {
      'query_scale': (embed_dim // num_heads) ** -0.5 if is_27b else None,
      'sliding_window': self._get('attention.sliding_window'),
      'sliding_layers': tuple((i + 1) % period != 0 for i in range(num_layers)),
      'local_rope_theta': self._get('rope.freq_base_swa', 10_000.0),
    }

  def _rope_scaling(
    self, head_dim: int, theta: float
  ) -> tuple[RopeScaling | None, int]:
    """Returns the scaling, and tokens of the longest text."""
    with errors.explained(f'{self._path}: ', errors.UserError):
      scaling, max_context = gguf_rope.read(
        self.metadata,
        self._architecture,
        self._get('context_length'),
        head_dim,
      )
    if 'rope_freqs.weight' not in self._tensors:
      return scaling, max_context
    # Llama 3.1: the file holds the divisors, the largest is the factor.
    divisors = _dequantize(self._tensors['rope_freqs.weight'])
    llama3 = RopeScaling(kind='llama3', factor=float(divisors.max()))
    plain = layers.rope_frequencies(head_dim, theta, None)
    scaled = layers.rope_frequencies(head_dim, theta, llama3)
    is_llama3 = np.allclose(plain / divisors, scaled, rtol=1e-3)
    if scaling is not None or not is_llama3:
      raise errors.UserError(
        f'{self._path}: rope_freqs.weight is not the Llama 3.1 scaling alone'
      )
    return llama3, max_context

  @property
  def block_kinds(self) -> frozenset[str] | None:
    """Kinds of all matrices and tables; None if kernels cannot multiply one."""
    matrices = (x for x in self._tensors.values() if len(x.shape) > 1)
    kinds = frozenset(x.kind.name for x in matrices)
    return kinds if kinds.issubset(native.KINDS) else None

  def read_params(self, config: ModelConfig, place: families.Place) -> Params:
    """Returns the parameters as `place` puts them, dequantized or in blocks.

    Raises:
      UserError: missing or contradicting weights, or a type of quantization
        that the gguf package cannot read, or the native kernels.
    """
    # A damaged number of layers may be large, and all names take long to make.
    self._tensor(f'blk.{config.num_layers - 1}.attn_norm.weight')
    get = functools.partial(self._get_tensor, config)
    read = None
    if config.weight_dtype == config_lib.STORED:
      get = functools.partial(self._get_table, config)
      read = functools.partial(self._get_blocks, config)
    get = functools.partial(families.get_checked, get)
    # The file stores Gemma's norm scales with the one already added.
    return families.params_from_hf(get, config, 0.0, place, read)

  @functools.cached_property
  def _names(self) -> gguf.TensorNameMap:
    """The names of tensors by those of Hugging Face."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    num_layers = self._get('block_count')
    return gguf.get_tensor_name_map(kinds[self._architecture], num_layers)

  def _name(self, hf_name: str) -> str:
    return self._names.get_name(hf_name, ('.weight', '.bias'))

  def _tensor(self, name: str) -> gguf_header.Tensor:
    if name not in self._tensors:
      raise errors.UserError(
        f'{self._path}: tensor {name} is missing; the weights are not '
        'complete or belong to another architecture'
      )
    return self._tensors[name]

  def _get_tensor(self, config: ModelConfig, hf_name: str) -> np.ndarray:
    name = self._name(hf_name)
    tensor = self._tensor(name)
    unknown = (
      f'{self._path}: {name} cannot be dequantized by the gguf package: '
    )
    with errors.explained(unknown, NotImplementedError):
      return self._in_order(config, name, _dequantize(tensor))

  def _in_order(
    self, config: ModelConfig, name: str, array: np.ndarray
  ) -> np.ndarray:
    """Returns outputs of a tensor in the order of Hugging Face."""
    is_permuted = name.endswith(('attn_q.weight', 'attn_k.weight'))
    if self._architecture == 'llama' and is_permuted:
      return _unpermute(array, config.head_dim)
    return array

  def _get_table(
    self, config: ModelConfig, hf_name: str
  ) -> StoredBlocks | np.ndarray:
    """Returns a table in its blocks; what is no table as `_get_tensor` does."""
    if hf_name not in TABLES:
      return self._get_tensor(config, hf_name)
    start = hf_name.removesuffix('.weight')
    return self._get_blocks(config, start, config.vocab_size, config.embed_dim)

  def _get_blocks(
    self, config: ModelConfig, hf_name: str, *shape: int
  ) -> StoredBlocks:
    """Returns the matrix [out, in] of a name without `.weight`."""
    name = self._name(f'{hf_name}.weight')
    tensor = self._tensor(name)
    kind = tensor.kind.name
    if kind not in native.KINDS:
      raise errors.UserError(
        f"{self._path}: {name} has type {kind}, and weight_dtype='stored' "
        f'multiplies {", ".join(native.KINDS)}; leave out weight_dtype, which '
        'dequantizes it'
      )
    found = gguf.quant_shape_from_byte_shape(tensor.shape, tensor.kind)
    array_parts.check_shape(f'{self._path}: {name}', found, shape)
    places = np.arange(shape[0], dtype=np.int32)
    order = self._in_order(config, name, places)
    return StoredBlocks([tensor], shape[1], order)


def _dequantize(tensor: gguf_header.Tensor) -> np.ndarray:
  """Returns f32, or the file's own dtype where it is not quantized."""
  shape = gguf.quant_shape_from_byte_shape(tensor.data.shape, tensor.kind)
  # The package works on 16 rows at a time. That is slow for short rows, which
  # are joined here to some 2 ** 13 numbers.
  num_joined = math.gcd(
    math.prod(shape[:-1]), 1 << (2**13 // shape[-1]).bit_length()
  )
  rows = tensor.data.reshape(math.prod(shape[:-1]) // num_joined, -1)
  return gguf.dequantize(rows, tensor.kind).reshape(shape)


def _unpermute(array: np.ndarray, head_dim: int) -> np.ndarray:
  """Undoes llama.cpp's order: it interleaves the two rotary halves."""
  rows = array.reshape(-1, head_dim // 2, 2, *array.shape[1:])
  return np.swapaxes(rows, 1, 2).reshape(array.shape)
