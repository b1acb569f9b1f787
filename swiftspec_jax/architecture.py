"""What some families of models have: parts of a `ModelConfig`."""

import dataclasses

from swiftspec_jax import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How rotary frequencies are stretched for long contexts.

  Attributes:
    kind: name of the method: 'linear' (all frequencies are divided), 'llama3'
      (only the low ones are; Llama 3.1 model card) or 'yarn' (too, and queries
      and keys get a factor; YaRN paper, section 3).
    factor: number by which frequencies are divided.
    low_freq_factor: turns in the original context up to which a frequency is
      divided by the whole factor ('llama3', 'yarn').
    high_freq_factor: turns from which it is kept.
    original_max_context: tokens of the original context.
    attention_factor: factor of rotated queries and keys ('yarn').
    is_truncated: whether the blended frequencies are whole ones ('yarn').
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_context: int = 8192
  attention_factor: float = 1.0
  is_truncated: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3:
  """How an EAGLE-3 head reads features; names as in vLLM's `speculators`.

  Its first layer attends with the pair of normed embedding and normed feature,
  side by side, and adds to the feature alone (EAGLE-3 paper, section 3.1).

  Attributes:
    norm_before_residual: the normed feature is what it adds to.
    norm_before_fc: all features of the target are normed together before they
      are projected.
    fc_norm: each layer's are normed for themselves.
    norm_output: the feature of the next token is the normed output (EAGLE-3.1),
      not the one before the norm.
  """

  norm_before_residual: bool = False
  norm_before_fc: bool = False
  fc_norm: bool = False
  norm_output: bool = False

  def __post_init__(self):
    if self.norm_before_fc and self.fc_norm:
      raise errors.UserError(
        'norm_before_fc and fc_norm exclude each other; leave one of them out'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrent:
  """A draft head whose state goes from token to token (ReDrafter, section 3.1).

  It has no layers, and so no keys and values: what it knows of a text is the
  target's last hidden state.

  Attributes:
    num_blocks: residual blocks between the state and the unembedding.
    width: width of these blocks; a projection leads there if it is not twice
      that of the target.
    is_sum: whether the state is the sum of the embeddings, without weights.
  """

  num_blocks: int
  width: int
  is_sum: bool = False

  def __post_init__(self):
    checks = {
      'num_blocks': (self.num_blocks >= 0, '>= 0'),
      'width': (self.width >= 1, '>= 1'),
    }
    errors.check_fields(self, checks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A mixture of experts in the place of a feed-forward.

  Attributes:
    num_experts: number of feed-forwards of a layer.
    num_active: number of them that a token is fed through.
    ffw_dim: width inside each.
    is_normalized: whether the shares of a token's experts sum to one.
    dense_layers: layers that have an ordinary feed-forward.
    use_bias: whether router and experts have biases (gpt-oss).
    gate_limit: bound of the products with gate and up; behind it the activation
      is `gate * sigmoid(gate_slope * gate) * (up + 1)` (gpt-oss model card,
      section 2.1). None is the model's own activation.
    gate_slope: factor inside of that sigmoid.
  """

  num_experts: int
  num_active: int
  ffw_dim: int
  is_normalized: bool = True
  dense_layers: tuple[int, ...] = ()
  use_bias: bool = False
  gate_limit: float | None = None
  gate_slope: float = 1.702

  def __post_init__(self):
    checks = {
      'num_active': (
        1 <= self.num_active <= self.num_experts,
        f'from 1 to num_experts={self.num_experts}',
      ),
      'ffw_dim': (self.ffw_dim >= 1, '>= 1'),
    }
    errors.check_fields(self, checks)
