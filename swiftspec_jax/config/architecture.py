"""What some families of models have: parts of a `ModelConfig`."""

import dataclasses

from swiftspec_jax import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How rotary frequencies are stretched for long contexts.

  Attributes:
    kind: name of the method: 'linear' (all frequencies are divided), 'dynamic'
      (the base grows, as for the longest text), 'llama3' (only the low ones
      are divided; Llama 3.1 model card), 'yarn' (too, and queries and keys get
      a factor; YaRN paper, section 3), 'longrope' (each is divided by a number
      of its own; arXiv 2402.13753) or 'proportional' (all are divided, and the
      lowest ones become zero; Gemma 4).
    factor: number by which frequencies are divided, or the context grows.
    low_freq_factor: turns in the original context up to which a frequency is
      divided by the whole factor ('llama3', 'yarn').
    high_freq_factor: turns from which it is kept.
    original_max_context: tokens of the original context.
    attention_factor: factor of rotated queries and keys ('yarn', 'longrope').
    is_truncated: whether the blended frequencies are whole ones ('yarn').
    rotated_share: share of the frequencies that are not zero ('proportional').
    divisors: numbers by which the frequencies are divided ('longrope').
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_context: int = 8192
  attention_factor: float = 1.0
  is_truncated: bool = True
  rotated_share: float = 1.0
  divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class IRope:
  """Layers with and without rotary embedding take turns (Llama 4).

  The window of the sliding layers is a chunk: the text is cut at multiples of
  its size, and a token sees what its own chunk has up to there.

  Attributes:
    nope_layers: layers without rotary embedding.
    floor_scale: tokens that become one step of the factor of their queries.
    attn_scale: slope of that factor in the logarithm of the steps; it is
      `1 + attn_scale * log(1 + (position + 1) // floor_scale)`
      (Scalable-Softmax, arXiv 2501.19399).
    norms_rotated: whether rotated queries and keys are normed, without scales.
  """

  nope_layers: tuple[int, ...]
  floor_scale: int = 8192
  attn_scale: float = 0.1
  norms_rotated: bool = True

  def __post_init__(self):
    checks = {'floor_scale': (self.floor_scale >= 1, '>= 1')}
    errors.check_fields(self, checks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4:
  """What Gemma 4 has beside what Gemma 3 has.

  Values are normed, without scales, and a learned number multiplies what a
  layer returns. The layers without a window have heads of another size.

  Attributes:
    global_kv_heads: kv heads of the layers without a window.
    global_head_dim: size of their heads.
    num_kv_layers: number of layers that have keys and values. Those after see
      what the last of them with a window has, or the last one without, as they
      have a window or not.
    shares_values: whether the values of layers without a window are their keys,
      before norm and rotation.
    widening: factor of the feed-forward's width in those after.
    input_dim: width of what each layer gets of a token beside the output of the
      layer before; 0 is nothing.
  """

  global_kv_heads: int
  global_head_dim: int
  num_kv_layers: int
  shares_values: bool = False
  widening: int = 1
  input_dim: int = 0


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
class Block:
  """How a draft proposes a block of tokens in one forward.

  Masks stand after the last known token. In DFlash (arXiv 2602.06036) each
  drafts the token in its own place, and all see each other. The layers see the
  text as features of the target, which each makes keys and values of. In an
  EAGLE-3 head (P-EAGLE) the known token and the masks draft the next one each,
  and a learned feature comes before a mask.

  Attributes:
    num_drafts: most tokens that a forward drafts.
    mask_token_id: token that stands for those to be drafted.
    causal_layers: layers of DFlash in which a token of the block sees none
      after it.
  """

  num_drafts: int
  mask_token_id: int
  causal_layers: tuple[int, ...] = ()

  def __post_init__(self):
    checks = {
      'num_drafts': (self.num_drafts >= 1, 'at least 1'),
      'mask_token_id': (self.mask_token_id >= 0, '>= 0'),
    }
    errors.check_fields(self, checks)


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
    gate_limit: bound of the products with gate and up; after it the activation
      is `gate * sigmoid(gate_slope * gate) * (up + 1)` (gpt-oss model card,
      section 2.1). None is the model's own activation.
    gate_slope: factor inside of that sigmoid.
    scales_inputs: whether the shares are sigmoids of the scores, and multiply
      what goes into an expert in the place of what comes out (Llama 4).
    has_shared: whether all tokens also go through one more feed-forward of the
      same width (Llama 4).
    is_beside_dense: whether all tokens also go through the layer's ordinary
      feed-forward. Both then have norms of their own, and factors multiply the
      shares of the experts (Gemma 4).
  """

  num_experts: int
  num_active: int
  ffw_dim: int
  is_normalized: bool = True
  dense_layers: tuple[int, ...] = ()
  use_bias: bool = False
  gate_limit: float | None = None
  gate_slope: float = 1.702
  scales_inputs: bool = False
  has_shared: bool = False
  is_beside_dense: bool = False

  def __post_init__(self):
    checks = {
      'num_active': (
        1 <= self.num_active <= self.num_experts,
        f'from 1 to num_experts={self.num_experts}',
      ),
      'ffw_dim': (self.ffw_dim >= 1, '>= 1'),
    }
    errors.check_fields(self, checks)
