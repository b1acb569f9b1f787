"""How long a forward takes on chips that one does not have.

A forward of few tokens reads the weights and the context's keys and values, and
starts its kernels one after the other. Twice in each layer it adds up what the
chips have found (tensor parallelism). Products of few tokens hide behind the
reading. Activations and caches are bfloat16.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from swiftspec_jax import errors, sharding
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import params as params_lib

_DTYPE = jnp.dtype(jnp.bfloat16)
_SCALE_BYTES = 4  # of a group of int4
_ALL_REDUCES = 2  # of a layer: behind attention and behind the feed-forward
# Kernels of a layer, without all-reduces. Stock: norm, q-k-v, rotation, cache
# write, attention in two, its output, norm, gate and up, their product, down.
# Fused (SwiftSpec, section 3.3): attention is one, gate and up with it another.
_STOCK_KERNELS, _FUSED_KERNELS = 11, 7
_OTHER_KERNELS = 4  # embedding, last norm, logits, choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One accelerator, as its maker describes it but for the two latencies.

  Attributes:
    name: name for messages and results.
    memory_bytes: bytes of memory.
    peak_flops: operations per second of dense products, by dtype.
    memory_bandwidth: bytes per second read from memory.
    link_bandwidth: bytes per second that leave for the other chips.
    link_latency: seconds that each chip adds to a small all-reduce.
    launch_seconds: seconds between the starts of kernels that do little.
  """

  name: str
  memory_bytes: float
  peak_flops: Mapping[str, float]
  memory_bandwidth: float
  link_bandwidth: float
  link_latency: float
  launch_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
  """Shares of the memory bandwidth that products of few tokens reach.

  Attributes:
    wide: share where the weights are bfloat16.
    quantized: share where they are integers.
  """

  wide: float
  quantized: float


# `experiments.plan` fits both, and the seconds of a launch, to the published
# step times, and `tests/plan_test.py` that these are the fit.
FITTED = Efficiency(wide=0.917, quantized=0.586)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
  """What a forward works on.

  Attributes:
    config: description of the model; how it is sharded is of no account.
    num_chips: number of chips that share it.
    num_tokens: tokens that are fed.
    context: tokens in the cache.
    is_fused: whether it runs on fused kernels.
  """

  config: ModelConfig
  num_chips: int
  num_tokens: int
  context: int
  is_fused: bool = False

  def __post_init__(self):
    if self.config.experts:
      raise errors.UserError(
        'a mixture of experts cannot be planned: a forward reads only some of '
        f'its {self.config.experts.num_experts} experts; name a dense model'
      )

  @property
  def sharded(self) -> ModelConfig:
    """The model with the padding that its number of chips needs."""
    return dataclasses.replace(self.config, num_shards=self.num_chips)

  @property
  def kv_bytes(self) -> int:
    """Bytes of keys and values on a chip."""
    config = self.sharded
    heads = config.padded_kv_heads // self.num_chips
    row = 2 * heads * config.head_dim * _DTYPE.itemsize
    return config.num_layers * self.context * row


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSeconds:
  """Seconds of the parts of a forward.

  Attributes:
    weights: seconds of reading them.
    kv: seconds of reading keys and values.
    compute: seconds of the products, beside the reading.
    all_reduces: seconds of adding up over the chips.
    launches: seconds of starting kernels.
  """

  weights: float
  kv: float
  compute: float
  all_reduces: float
  launches: float

  @property
  def total(self) -> float:
    """Seconds of the forward."""
    work = max(self.weights + self.kv, self.compute)
    return work + self.all_reduces + self.launches

  @property
  def limit(self) -> str:
    """The name of the largest part."""
    parts = dataclasses.asdict(self)
    return max(parts, key=parts.get)


@functools.cache
def weight_bytes(config: ModelConfig) -> tuple[float, float, float]:
  """Returns bytes on one chip: wide ones read, integers read, all held.

  Args:
    config: description of the model, with its number of shards.
  """
  specs = params_lib.param_specs(config)
  is_tied = 'unembedding' not in specs
  wide = quantized = held = 0.0
  for path, spec in jax.tree_util.tree_leaves_with_path(specs):
    size = _bytes(spec, config)
    held += size
    if path[0].key == 'embedding' and not is_tied:
      continue  # only some rows are read
    if spec.scheme is None:
      wide += size
    else:
      quantized += size
  return wide, quantized, held


def _bytes(spec: params_lib.ParamSpec, config: ModelConfig) -> float:
  """Returns the bytes of a parameter on one chip.

  The scales of int8, one for each output, are left out.
  """
  count = math.prod(spec.padded_shape)
  if any(sharding.MODEL_AXIS in sharding.RULES.get(a, ()) for a in spec.axes):
    count /= config.num_shards
  if spec.scheme is None:
    return count * spec.dtype(_DTYPE).itemsize
  if config.weight_dtype == 'int4':
    return count * (0.5 + _SCALE_BYTES / spec.scheme.group_size)
  return count


def predict(
  forward: Forward, chip: Chip, efficiency: Efficiency = FITTED
) -> ForwardSeconds:
  """Returns the seconds of a forward on chips of one kind."""
  config, num_chips = forward.sharded, forward.num_chips
  wide, quantized, _ = weight_bytes(config)
  width = 0.5 + _SCALE_BYTES / 128 if config.weight_dtype == 'int4' else 1.0
  count = wide / _DTYPE.itemsize + quantized / width
  sums = forward.num_tokens * config.embed_dim * _DTYPE.itemsize
  ring = 2 * (num_chips - 1) / num_chips * sums / chip.link_bandwidth
  reduction = num_chips * chip.link_latency + ring if num_chips > 1 else 0.0
  kernels = _FUSED_KERNELS if forward.is_fused else _STOCK_KERNELS
  num_launches = config.num_layers * kernels + _OTHER_KERNELS
  return ForwardSeconds(
    weights=(wide / efficiency.wide + quantized / efficiency.quantized)
    / chip.memory_bandwidth,
    kv=forward.kv_bytes / chip.memory_bandwidth / efficiency.wide,
    compute=2 * count * forward.num_tokens / chip.peak_flops[_DTYPE.name],
    all_reduces=config.num_layers * _ALL_REDUCES * reduction,
    launches=num_launches * chip.launch_seconds,
  )


def check_fits(forwards: Sequence[Forward], chip: Chip) -> None:
  """Raises UserError if models do not fit into the chip that they share."""
  needed = sum(weight_bytes(f.sharded)[2] + f.kv_bytes for f in forwards)
  if needed > chip.memory_bytes:
    numbers = ' and '.join(str(f.num_chips) for f in forwards)
    raise errors.UserError(
      f'{needed / 1e9:.1f} GB of weights and cache do not fit into the '
      f'{chip.memory_bytes / 1e9:.0f} GB of a {chip.name} when {numbers} chips '
      'share a model; take more chips or fewer bits for a weight'
    )
