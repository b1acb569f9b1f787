"""Static descriptions: what a model is and how to sample from it.

All are frozen dataclasses of plain Python values, hashable, so that they can
be static arguments of jitted functions.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kernels_pallas import dispatch
from swiftspec_jax import errors
from swiftspec_jax.architecture import (
  Block,
  Eagle3,
  Experts,
  Gemma4,
  IRope,
  Recurrent,
  RopeScaling,
  Vision,
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
WEIGHT_DTYPES = ('int8', 'int4', 'float8', 'mxfp4', *DYNAMIC_TERMS)
WIDE = 'wide'  # what makes `load` widen a checkpoint of few bits
_OF_EXPERTS = ('int8', 'int4', 'float8', 'mxfp4')


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
  of `DYNAMIC_TERMS` hold for all matrices that activations meet, the others for
  the matrices of the layers.
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
  use_post_norms: bool = False  # Gemma: norms also behind each block
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
  vision: Vision | None = None  # LLaVA
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
    for field in _POSITIVE:
      if getattr(self, field) < 1:
        raise errors.UserError(
          f'{field} must be positive, got {getattr(self, field)}'
        )
    if self.kernels not in dispatch.IMPLEMENTATIONS:
      raise errors.UserError(
        f'kernels={self.kernels!r} must be one of '
        f'{", ".join(dispatch.IMPLEMENTATIONS)}'
      )
    self._check_weight_dtype()
    if self.num_heads % self.num_kv_heads:
      raise errors.UserError(
        f'num_heads={self.num_heads} is not a multiple of '
        f'num_kv_heads={self.num_kv_heads}'
      )
    if self.output_vocab_size is not None and not (
      1 <= self.output_vocab_size <= self.vocab_size
    ):
      raise errors.UserError(
        f'output_vocab_size={self.output_vocab_size} must be between 1 and '
        f'vocab_size={self.vocab_size}'
      )
    if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
      raise errors.UserError(
        f'sliding_layers names {len(self.sliding_layers)} layers, the model '
        f'has {self.num_layers}'
      )
    self._check_draft()
    if bool(self.feature_layers) != bool(self.feature_dim):
      raise errors.UserError(
        f'feature_layers={self.feature_layers} and '
        f'feature_dim={self.feature_dim} belong together; give both or none'
      )

  def _check_draft(self) -> None:
    if self.eagle3 and (not self.feature_layers or self.sliding_window):
      raise errors.UserError(
        f'an EAGLE-3 head with feature_layers={self.feature_layers} and '
        f'sliding_window={self.sliding_window} is not supported; it needs '
        'features and no window'
      )
    if self.is_mtp and self.feature_dim != self.embed_dim:
      raise errors.UserError(
        f'a layer for multi-token prediction with feature_dim='
        f'{self.feature_dim} is not supported; it reads one layer of '
        f'{self.embed_dim}'
      )
    if self.block and (
      not self.feature_layers or self.block.mask_token_id >= self.vocab_size
    ):
      raise errors.UserError(
        f'a draft of blocks with feature_layers={self.feature_layers} and '
        f'mask_token_id={self.block.mask_token_id} is not supported; it needs '
        f'features and a mask among the {self.vocab_size} tokens'
      )
    if self.recurrent and (self.num_layers or len(self.feature_layers) != 1):
      raise errors.UserError(
        f'a recurrent head with num_layers={self.num_layers} and '
        f'feature_layers={self.feature_layers} is not supported; it needs no '
        'layers and one feature'
      )

  def _check_weight_dtype(self) -> None:
    if self.weight_dtype not in (None, *WEIGHT_DTYPES):
      raise errors.UserError(
        f'weight_dtype={self.weight_dtype!r} must be one of '
        f'{", ".join(WEIGHT_DTYPES)}, or None to keep the weights as they are'
      )
    if self.experts and self.weight_dtype not in (None, *_OF_EXPERTS):
      raise errors.UserError(
        f'weight_dtype={self.weight_dtype!r} is not supported for mixtures of '
        f'experts; take {", ".join(_OF_EXPERTS)} or leave it out'
      )
    if not self.experts and self.weight_dtype == 'mxfp4':
      raise errors.UserError(
        f'weight_dtype={self.weight_dtype!r} is for mixtures of experts, and '
        f'{self.family} has none; take float8 or int4'
      )

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
    """Whether its hidden states lie behind its final norm."""
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
    return self._padded(self.ffw_dim, self._least_multiple(self.ffw_dim))

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
    size = self.expert_ffw_dim
    return self._padded(size, self._least_multiple(size))

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

  def _least_multiple(self, size: int) -> int:
    # A device has whole groups.
    if self.weight_dtype is None:
      return 1
    return group_size(size, self.weight_dtype)

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
    values = dict(values)
    if values.get('rope_scaling') is not None:
      values['rope_scaling'] = RopeScaling(**values['rope_scaling'])
    if values.get('irope') is not None:
      nope_layers = tuple(values['irope']['nope_layers'])
      values['irope'] = IRope(**{**values['irope'], 'nope_layers': nope_layers})
    if values.get('gemma4') is not None:
      values['gemma4'] = Gemma4(**values['gemma4'])
    if values.get('eagle3') is not None:
      values['eagle3'] = Eagle3(**values['eagle3'])
    if values.get('block') is not None:
      causal_layers = tuple(values['block']['causal_layers'])
      values['block'] = Block(
        **{**values['block'], 'causal_layers': causal_layers}
      )
    if values.get('recurrent') is not None:
      values['recurrent'] = Recurrent(**values['recurrent'])
    if values.get('experts') is not None:
      dense_layers = tuple(values['experts']['dense_layers'])
      values['experts'] = Experts(
        **{**values['experts'], 'dense_layers': dense_layers}
      )
    if values.get('vision') is not None:
      colours = {k: tuple(values['vision'][k]) for k in ('mean', 'std')}
      values['vision'] = Vision(**{**values['vision'], **colours})
    for field in ('eos_token_ids', 'sliding_layers', 'feature_layers'):
      values[field] = tuple(values.get(field, ()))
    return cls(**values)


MAX_TOP_LOGPROBS = 20  # as OpenAI has it
_LEAST_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """How the tokens of one request are chosen; names as in vLLM.

  Attributes:
    temperature: divisor of the logits; 0 is greedy, 1 the model's own law.
      Below 1e-5 it becomes 0, as in vLLM's sampler: such a law is greedy in
      float32, or overflows.
    top_k: number of the most probable tokens that are kept; 0 keeps all.
    top_p: least sum of probabilities that the kept tokens have, the most
      probable ones first; 1 keeps all.
    min_p: least probability of a kept token, as a share of the most probable
      one's.
    repetition_penalty: factor against tokens seen in prompt or output: positive
      logits are divided by it, negative ones multiplied; 1 is off (CTRL paper,
      section 4).
    presence_penalty: number subtracted from logits of tokens seen in the
      output, as in OpenAI's API.
    frequency_penalty: number subtracted from the logit of a token for each time
      that it was seen in the output.
    logit_bias: numbers added to logits, by token.
    banned_token_ids: tokens that are never emitted.
    forced_token_ids: tokens that the output starts with.
    seed: seed of the noise. The same seed, prompt, models and mode give the
      same tokens whatever else is in the batch.
    stop: strings that end the output; they are not part of the text.
    max_new_tokens: token limit; None is up to the context limit.
    ignore_eos: whether to go on behind an end-of-sequence token.
    logprobs: whether to return the log-probability of each token under the
      model's own law (before temperature, penalties and truncation).
    top_logprobs: number of the most probable tokens at each position that are
      returned, too, with their log-probabilities; needs `logprobs`.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  banned_token_ids: tuple[int, ...] = ()
  forced_token_ids: tuple[int, ...] = ()
  seed: int = 0
  stop: tuple[str, ...] = ()
  max_new_tokens: int | None = 256
  ignore_eos: bool = False
  logprobs: bool = False
  top_logprobs: int = 0

  def __post_init__(self):
    checks = {
      'temperature': (0 <= self.temperature < math.inf, 'finite and >= 0'),
      'top_k': (0 <= self.top_k < 2**31, '>= 0 (0 keeps all tokens)'),
      'top_p': (0 < self.top_p <= 1, 'in (0, 1]'),
      'min_p': (0 <= self.min_p < 1, 'in [0, 1)'),
      'repetition_penalty': (
        0 < self.repetition_penalty < math.inf,
        'finite and > 0',
      ),
      'presence_penalty': (-2 <= self.presence_penalty <= 2, 'in [-2, 2]'),
      'frequency_penalty': (-2 <= self.frequency_penalty <= 2, 'in [-2, 2]'),
      'seed': (0 <= self.seed < 2**32, 'in [0, 2**32)'),
      'max_new_tokens': (
        self.max_new_tokens is None or self.max_new_tokens >= 1,
        '>= 1, or None for the context limit',
      ),
      'top_logprobs': (
        0 <= self.top_logprobs <= (MAX_TOP_LOGPROBS if self.logprobs else 0),
        f'0 to {MAX_TOP_LOGPROBS}, and 0 without logprobs',
      ),
      'stop': (
        not isinstance(self.stop, str) and all(self.stop),
        'a sequence of non-empty strings',
      ),
    }
    errors.check_fields(self, checks)
    if self.temperature < _LEAST_TEMPERATURE:
      object.__setattr__(self, 'temperature', 0.0)

  def check_vocabulary(self, vocab_size: int) -> None:
    """Raises UserError if a token id lies outside the vocabulary."""
    for field in ('logit_bias', 'banned_token_ids', 'forced_token_ids'):
      for token_id in getattr(self, field):
        if not 0 <= token_id < vocab_size:
          raise errors.UserError(
            f'{field} names token {token_id}; ids are 0 to {vocab_size - 1}'
          )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
  """How a draft model grows its token tree, and what it sends of it.

  The letters are those of the SwiftSpec paper, section 3.1.

  Attributes:
    num_nodes: nodes that the target verifies in a round (bs). The root, which
      is the last known token, is one of them.
    width: leaves that one draft forward expands (w).
    num_draft_steps: draft forwards of a round (d).
    branching: children of a leaf that enter the tree.
    num_restart_steps: forwards that a new tree gets after the first one before
      it is sent, if the last verified token was not in the old tree. The
      target waits for them. Asynchronous mode only.
    waits_for_misses: whether the target waits until every row has a tree again.
      If not, a row whose last verified token was not in its tree sends that
      token alone, and grows a new tree while the target verifies. The target
      then waits only if no row has a tree. None chooses in each round, as
      `drafting.trees.round_rates` says. Asynchronous mode with several rows
      only.
    capacity: most nodes of a tree.
    num_cache_rows: most nodes of a tree with keys and values.
    coverage: nats by which possible next roots that were not sent are
      preferred for expansion; 0 is the paper's order. Asynchronous mode only.
    exit_layer: number of layers of the target behind which it tells the draft
      what they expect (Mirror-SD); a negative one is counted from the last; 0
      is off. Each node that was sent gets up to `branching` such children.
      Asynchronous mode only, and without `forced_acceptance`, which it would
      raise.
    is_adaptive: whether `num_nodes` and `num_draft_steps`, up to the values
      here, are chosen while decoding, from the acceptance and the step times.
      Where no tree pays it decodes plainly, and tries again from time to time.
    min_leaf_mass: least probability, by the draft, of all leaves of a forward
      together. With less, a tree of `num_nodes` grows no further in this round;
      0 is off.
    is_depth_priced: whether `min_leaf_mass` is chosen while decoding, so that a
      forward is run if what it may add is worth its time.
    prompt_lookup: whether the tree also gets the tokens that followed the
      longest earlier match of the last tokens. Their score is how often such
      tokens were right in this request.
    suffix_lookup: whether the tree also gets the tokens that followed several
      matches, longer and shorter ones.
    forced_acceptance: probability that the best child is right, for studies
      of speed. The draft then knows the output, which the request must name.
  """

  num_nodes: int = 8
  width: int = 8
  num_draft_steps: int = 4
  branching: int = 8
  num_restart_steps: int = 0
  waits_for_misses: bool | None = None
  capacity: int = 256
  num_cache_rows: int = 128
  coverage: float = 0.0
  exit_layer: int = 0
  is_adaptive: bool = False
  min_leaf_mass: float = 0.0
  is_depth_priced: bool = False
  prompt_lookup: bool = True
  suffix_lookup: bool = False
  forced_acceptance: float | None = None

  def __post_init__(self):
    forced = self.forced_acceptance
    checks = {
      'num_nodes': (
        1 <= self.num_nodes <= self.capacity,
        f'from 1 to the capacity of {self.capacity} nodes',
      ),
      'width': (
        1 <= self.width <= self.num_cache_rows,
        f'from 1 to num_cache_rows={self.num_cache_rows}',
      ),
      'num_draft_steps': (self.num_draft_steps >= 0, '>= 0'),
      'branching': (self.branching >= 1, '>= 1'),
      'num_restart_steps': (self.num_restart_steps >= 0, '>= 0'),
      'num_cache_rows': (
        1 <= self.num_cache_rows <= self.capacity,
        f'from 1 to the capacity of {self.capacity} nodes',
      ),
      'coverage': (0 <= self.coverage < math.inf, 'finite and >= 0'),
      'exit_layer': (
        forced is None or not self.exit_layer,
        '0 with forced_acceptance, which the layers would raise',
      ),
      'min_leaf_mass': (0 <= self.min_leaf_mass < 1, 'in [0, 1)'),
      'is_depth_priced': (
        not self.is_depth_priced
        or not (self.is_adaptive or self.min_leaf_mass),
        'False with is_adaptive or min_leaf_mass, which choose the depth, too',
      ),
      'forced_acceptance': (
        forced is None or 0 < forced <= 1,
        'in (0, 1], or None',
      ),
    }
    errors.check_fields(self, checks)
