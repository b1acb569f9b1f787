"""What a model is: its sizes, switches and the dtype of its weights."""

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from kernels_pallas import dispatch
from swiftspec_jax import errors
from swiftspec_jax.config.architecture import (
  Block,
  Eagle3,
  Experts,
  Gemma4,
  IRope,
  Recurrent,
  RopeScaling,
)

_POSITIVE = (
  'vocab_size',
  'embed_dim',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'ffw_dim',
  'max_context',
  'num_shards',
)
# How many integers of int8 an activation becomes in the layers.
DYNAMIC_TERMS = {'int8_dynamic': 1, 'int8_dynamic16': 2}
STORED = 'stored'  # the blocks of a .gguf file
WEIGHT_DTYPES = ('int8', 'int4', 'float8', 'mxfp4', *DYNAMIC_TERMS, STORED)
WIDE = 'wide'  # what makes `load` widen a checkpoint of few bits
_OF_EXPERTS = ('int8', 'int4', 'float8', 'mxfp4')
_OF_DENSE = tuple(name for name in WEIGHT_DTYPES if name != 'mxfp4')


def group_size(num_inputs: int, weight_dtype: str = 'int4') -> int:
  """Returns how many inputs of a matrix share their scales.

  It is the largest power of two up to 128, or 32 of mxfp4, that divides the
  inputs.
  """
  return math.gcd(num_inputs, 32 if weight_dtype == 'mxfp4' else 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Sizes and switches of one decoder-only transformer.

  `num_shards` is the number of devices. Heads, widths and vocabulary that it
  does not divide are padded with zeros: the `padded_*` sizes are those of the
  arrays, the plain ones those of the model. `num_sequence_shards` is the number
  of devices that share the tokens of the same heads, so that the heads are on
  `num_shards // num_sequence_shards`. `kernels` is one
  of `kernels_pallas.dispatch.IMPLEMENTATIONS`. `weight_dtype` is one of
  `WEIGHT_DTYPES`, or None for matrices in the dtype of the other weights. Those
  of `DYNAMIC_TERMS` hold for all matrices that activations meet, `STORED` for
  tables, too, the others for the matrices of the layers.
  """

  family: str
  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ffw_dim: int
  max_context: int
  eos_token_ids: tuple[int, ...] = ()
  norm_eps: float = 1e-6
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  tie_embeddings: bool = True
  activation: str = 'silu'  # or 'gelu_tanh'
  use_qkv_bias: bool = False  # Qwen 2, gpt-oss
  use_output_bias: bool = False  # of the attention (gpt-oss)
  use_sinks: bool = False  # scores that take a share of attention (gpt-oss)
  use_qk_norm: bool = False  # Qwen 3, Gemma 3
  use_post_norms: bool = False  # Gemma: norms also after each block
  embed_scale: float = 1.0  # Gemma: sqrt(embed_dim)
  query_scale: float | None = None  # default head_dim ** -0.5
  sliding_window: int | None = None
  # True for each layer that sees only the window; empty: all layers do
  # (if there is a window at all).
  sliding_layers: tuple[bool, ...] = ()
  local_rope_theta: float | None = None  # of the sliding layers (Gemma 3)
  irope: IRope | None = None  # Llama 4
  gemma4: Gemma4 | None = None
  logit_cap: float | None = None  # bound that tanh sets to logits (Gemma 4)
  # What a layer projects for each kv head beside queries: keys and values, keys
  # that are values, too, or nothing. Only `of_layer` sets it.
  num_kv_parts: int = 2
  experts: Experts | None = None  # Qwen 3 MoE, gpt-oss, Llama 4
  # Of a draft that can propose only some of the tokens: their number. Its
  # parameter `output_token_ids` names them.
  output_vocab_size: int | None = None
  # Of a draft whose tokenizer or table is longer or shorter than its target's:
  # the number of first tokens that both have, which alone it proposes.
  shared_vocab_size: int | None = None
  # Of a draft that reads outputs of these layers of its target: their numbers,
  # and how wide they are side by side.
  feature_layers: tuple[int, ...] = ()
  feature_dim: int = 0
  # How it reads them where it is an EAGLE-3 head; None: they are added to the
  # embedding.
  eagle3: Eagle3 | None = None
  # Whether it reads them as a layer for multi-token prediction does that its
  # target was trained with (DeepSeek-V3, section 2.2).
  is_mtp: bool = False
  # How it reads them where it drafts a block in one forward.
  block: Block | None = None
  recurrent: Recurrent | None = None  # in the place of all layers
  num_shards: int = 1
  num_sequence_shards: int = 1
  kernels: str = 'auto'
  weight_dtype: str | None = None

  def __post_init__(self):
    errors.check_fields(
      self, {name: (getattr(self, name) >= 1, 'positive') for name in _POSITIVE}
    )
    kernels = ', '.join(dispatch.IMPLEMENTATIONS)
    dtypes = _OF_EXPERTS if self.experts else _OF_DENSE
    kind = 'mixtures of experts' if self.experts else 'dense models'
    outputs, size = self.output_vocab_size, self.vocab_size
    checks = {
      'kernels': (
        self.kernels in dispatch.IMPLEMENTATIONS,
        f'one of {kernels}',
      ),
      'weight_dtype': (
        self.weight_dtype in (None, *dtypes),
        f'one of {", ".join(dtypes)} for {kind}, or None for weights as they '
        'are',
      ),
      'num_heads': (
        self.num_heads % self.num_kv_heads == 0,
        f'a multiple of num_kv_heads={self.num_kv_heads}',
      ),
      'output_vocab_size': (
        outputs is None or 1 <= outputs <= size,
        f'from 1 to vocab_size={size}, or None',
      ),
      'sliding_layers': (
        len(self.sliding_layers) in (0, self.num_layers),
        f'empty, or as long as num_layers={self.num_layers}',
      ),
      **self._draft_checks(),
    }
    errors.check_fields(self, checks)

  def _draft_checks(self) -> dict[str, tuple[bool, str]]:
    features, block = self.feature_layers, self.block
    return {
      'feature_dim': (
        bool(features) == bool(self.feature_dim),
        f'given together with feature_layers={features}',
      ),
      'eagle3': (
        not self.eagle3 or bool(features and not self.sliding_window),
        'of a head with feature_layers and without a window',
      ),
      'is_mtp': (
        not self.is_mtp or self.feature_dim == self.embed_dim,
        'of a layer that reads one layer of its target',
      ),
      'block': (
        not block or bool(features and block.mask_token_id < self.vocab_size),
        f'of feature_layers, with a mask among the {self.vocab_size} tokens',
      ),
      'recurrent': (
        not self.recurrent or (not self.num_layers and len(features) == 1),
        'of a head without layers that reads one feature',
      ),
    }

  @property
  def reads_features(self) -> bool:
    """Whether it is a draft that reads outputs of its target's layers."""
    return bool(self.feature_layers)

  @property
  def reads_features_before(self) -> bool:
    """Whether each token is read with the feature of the one before it."""
    is_dflash = self.block is not None and self.eagle3 is None
    return self.reads_features and not is_dflash

  @property
  def hides_first_token(self) -> bool:
    """Whether no token sees the first one, which has no feature before it."""
    return self.eagle3 is not None or self.is_mtp

  @property
  def returns_normed(self) -> bool:
    """Whether its hidden states lie after its final norm."""
    return self.is_mtp or (self.eagle3 is not None and self.eagle3.norm_output)

  @property
  def hidden_dim(self) -> int:
    """Width of hidden states; of a recurrent head they are pairs."""
    return self.embed_dim * (2 if self.recurrent else 1)

  @property
  def num_query_groups(self) -> int:
    """Query heads for each kv head."""
    return self.num_heads // self.num_kv_heads

  @property
  def padded_kv_heads(self) -> int:
    unit = self.num_shards // self.num_sequence_shards
    return math.ceil(self.num_kv_heads / unit) * unit

  @property
  def padded_ffw_dim(self) -> int:
    return self._padded_in_groups(self.ffw_dim)

  @property
  def num_experts(self) -> int:
    """Experts of a layer; 0 where there are none."""
    return self.experts.num_experts if self.experts else 0

  @property
  def expert_ffw_dim(self) -> int:
    """Width inside each expert; 0 where there are none."""
    return self.experts.ffw_dim if self.experts else 0

  @property
  def padded_expert_ffw_dim(self) -> int:
    return self._padded_in_groups(self.expert_ffw_dim)

  @property
  def padded_vocab_size(self) -> int:
    return self._padded(self.vocab_size)

  @property
  def num_logits(self) -> int:
    """Tokens that the model can propose."""
    return self.output_vocab_size or self.shared_vocab_size or self.vocab_size

  @property
  def padded_num_logits(self) -> int:
    return self._padded(self.num_logits)

  def _padded_in_groups(self, size: int) -> int:
    # A device has whole groups.
    dtype = self.weight_dtype
    return self._padded(size, 1 if dtype is None else group_size(size, dtype))

  def _padded(self, size: int, multiple: int = 1) -> int:
    unit = self.num_shards * multiple
    return math.ceil(size / unit) * unit

  def has_experts(self, layer: int) -> bool:
    """Whether `layer` has experts in the place of its feed-forward."""
    return self.experts is not None and layer not in self.experts.dense_layers

  def is_sliding(self, layer: int) -> bool:
    """Whether `layer` sees only the tokens of a window."""
    if self.sliding_window is None:
      return False
    return self.sliding_layers[layer] if self.sliding_layers else True

  def of_layer(self, layer: int) -> 'ModelConfig':
    """Returns the configuration with the sizes that `layer` has."""
    gemma4 = self.gemma4
    if gemma4 is None:
      return self
    changes: dict[str, Any] = {}
    if not self.is_sliding(layer):
      changes = {
        'num_kv_heads': gemma4.global_kv_heads,
        'head_dim': gemma4.global_head_dim,
        'num_kv_parts': 1 if gemma4.shares_values else 2,
      }
    if layer >= self.num_kv_layers:
      changes['num_kv_parts'] = 0
      changes['ffw_dim'] = self.ffw_dim * gemma4.widening
    return dataclasses.replace(self, **changes)

  @property
  def num_kv_layers(self) -> int:
    """Layers that have keys and values, the first ones; mostly all."""
    if self.gemma4 is None:
      return self.num_layers
    return min(self.num_layers, self.gemma4.num_kv_layers)

  def kv_layer(self, layer: int) -> int:
    """Returns the layer whose keys and values `layer` sees; mostly itself."""
    if layer < self.num_kv_layers:
      return layer
    kind = self.is_sliding(layer)
    layers = range(self.num_kv_layers)
    return max(i for i in layers if self.is_sliding(i) == kind)

  @property
  def kv_heads(self) -> tuple[tuple[int, int], ...]:
    """Padded kv heads and head_dim of each layer that has keys and values."""
    layers = map(self.of_layer, range(self.num_kv_layers))
    return tuple((x.padded_kv_heads, x.head_dim) for x in layers)

  @property
  def layer_input_dim(self) -> int:
    """Width of what each layer gets of a token; 0 where that is nothing."""
    return self.gemma4.input_dim if self.gemma4 else 0

  def check_layers(self, name: str, layers: Sequence[int]) -> None:
    """Raises UserError if option `name` lists layers that do not exist."""
    for layer in layers:
      if not 0 <= layer < self.num_layers:
        raise errors.UserError(
          f'{name} names layer {layer}; the model has layers 0 to '
          f'{self.num_layers - 1}'
        )

  def with_layers(self, num_layers: int) -> 'ModelConfig':
    """Returns the model of the first layers.

    Raises:
      UserError: there are fewer.
    """
    if not 1 <= num_layers <= self.num_layers:
      raise errors.UserError(
        f'num_layers must be from 1 to the {self.num_layers} layers of the '
        f'model, got {num_layers}'
      )
    return dataclasses.replace(
      self,
      num_layers=num_layers,
      sliding_layers=self.sliding_layers[:num_layers],
    )

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> 'ModelConfig':
    """Returns what became `to_json`; in JSON its tuples are lists."""

    def made(kind, fields):
      pairs = fields.items()
      return kind(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in pairs}
      )

    parts = {
      name: made(kind, values[name])
      for name, kind in _PARTS.items()
      if values.get(name) is not None
    }
    return made(cls, {**values, **parts})


_PARTS = {
  name: kind
  for name, hint in typing.get_type_hints(ModelConfig).items()
  for kind in typing.get_args(hint)
  if dataclasses.is_dataclass(kind)
}
