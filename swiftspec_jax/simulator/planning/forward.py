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

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.runtime import sharding

_DTYPE = jnp.dtype(jnp.bfloat16)
# Of a quantized weight, by its dtype; 8 where it is not here.
_BITS = {'int4': 4, 'mxfp4': 4}
# Of the scale of a group; a scale of each output is left out.
_SCALE_BITS = {'int4': 32, 'float8': 32, 'mxfp4': 8}
_ALL_REDUCES = 2  # of a layer: after attention and after the feed-forward


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
class Chip:
  """One accelerator.

  Attributes:
    name: name for messages and results.
    device_kinds: JAX's names of it.
    memory_bytes: bytes of memory.
    peak_flops: operations per second of dense products, by dtype.
    memory_bandwidth: bytes per second read from memory.
    link_bandwidth: bytes per second that leave for the other chips.
    link_latency: seconds that each chip adds to a small all-reduce.
    launch_seconds: seconds between the starts of kernels that do little.
    efficiency: shares of the memory bandwidth that are reached.
    sources: origins of the numbers, by their names; the maker's data sheet
      where there is none.
  """

  name: str
  device_kinds: tuple[str, ...] = ()
  memory_bytes: float
  peak_flops: Mapping[str, float]
  memory_bandwidth: float
  link_bandwidth: float
  link_latency: float
  launch_seconds: float
  efficiency: Efficiency = FITTED
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launches:
  """Kernels that a program starts, which depend on no size but the layers.

  Attributes:
    layer: number for each layer, its two all-reduces left out.
    rest: number besides.
  """

  layer: float
  rest: float

  def of(self, config: ModelConfig) -> float:
    """Returns the kernels for a model."""
    return config.num_layers * self.layer + self.rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
  """What a forward works on.

  Attributes:
    config: description of the model; how it is sharded is of no account.
    num_chips: number of chips that share it.
    num_tokens: tokens that are fed.
    context: tokens in the cache.
    launches: kernels of the program that it is a part of.
  """

  config: ModelConfig
  num_chips: int
  num_tokens: int
  context: int
  launches: Launches

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
    numbers = sum(map(math.prod, self.sharded.kv_heads))
    return 2 * self.context * numbers * _DTYPE.itemsize // self.num_chips


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
  def parts(self) -> dict[str, float]:
    """The parts that follow each other: reading, or the products beside it."""
    parts = dataclasses.asdict(self)
    if self.compute < self.weights + self.kv:
      del parts['compute']
    else:
      del parts['weights'], parts['kv']
    return parts

  @property
  def total(self) -> float:
    """Seconds of the forward."""
    return sum(self.parts.values())

  @property
  def limit(self) -> str:
    """The name of the largest part."""
    return max(self.parts, key=self.parts.get)

  def scaled(self, factor: float) -> 'ForwardSeconds':
    """Returns all parts times a factor."""
    parts = dataclasses.asdict(self)
    return ForwardSeconds(**{k: factor * v for k, v in parts.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """Weights on one chip.

  Attributes:
    num_read: number of them that a forward reads.
    wide: bytes that it reads of weights without quantization.
    quantized: bytes that it reads of the others.
    held: bytes of all.
  """

  num_read: float
  wide: float
  quantized: float
  held: float


@functools.cache
def weights_of(config: ModelConfig) -> Weights:
  """Returns the weights of a model, with its number of shards."""
  specs = params_lib.param_specs(config)
  is_tied = 'unembedding' not in specs
  num_read = wide = quantized = held = 0.0
  for path, spec in jax.tree_util.tree_leaves_with_path(specs):
    count = math.prod(spec.padded_shape)
    if any(sharding.MODEL_AXIS in sharding.RULES.get(a, ()) for a in spec.axes):
      count /= config.num_shards
    size = count * _bits(spec, config.weight_dtype) / 8
    held += size
    is_table = path[0].key == 'embedding' and not is_tied
    if is_table or path[0].key == 'layer_embedding':
      continue  # only some rows are read
    num_read += count
    if spec.scheme is None:
      wide += size
    else:
      quantized += size
  return Weights(num_read=num_read, wide=wide, quantized=quantized, held=held)


def _bits(spec: params_lib.ParamSpec, weight_dtype: str | None) -> float:
  """Returns the bits of a weight and of its share of a scale."""
  if spec.scheme is None:
    return 8 * spec.dtype(_DTYPE).itemsize
  bits = _BITS.get(weight_dtype, 8)
  if scale_bits := _SCALE_BITS.get(weight_dtype):
    bits += scale_bits / spec.scheme.group_size
  return bits


def predict(forward: Forward, chip: Chip) -> ForwardSeconds:
  """Returns the seconds of a forward on chips of one kind."""
  config, num_chips = forward.sharded, forward.num_chips
  efficiency = chip.efficiency
  weights = weights_of(config)
  sums = forward.num_tokens * config.embed_dim * _DTYPE.itemsize
  ring = 2 * (num_chips - 1) / num_chips * sums / chip.link_bandwidth
  reduction = num_chips * chip.link_latency + ring if num_chips > 1 else 0.0
  return ForwardSeconds(
    weights=(
      weights.wide / efficiency.wide + weights.quantized / efficiency.quantized
    )
    / chip.memory_bandwidth,
    kv=forward.kv_bytes / chip.memory_bandwidth / efficiency.wide,
    compute=2
    * weights.num_read
    * forward.num_tokens
    / chip.peak_flops[_DTYPE.name],
    all_reduces=config.num_layers * _ALL_REDUCES * reduction,
    launches=forward.launches.of(config) * chip.launch_seconds,
  )


def check_fits(forwards: Sequence[Forward], chip: Chip) -> None:
  """Raises UserError if models do not fit into the chip that they share."""
  needed = sum(weights_of(f.sharded).held + f.kv_bytes for f in forwards)
  if needed > chip.memory_bytes:
    numbers = ' and '.join(str(f.num_chips) for f in forwards)
    raise errors.UserError(
      f'{needed / 1e9:.1f} GB of weights and cache do not fit into the '
      f'{chip.memory_bytes / 1e9:.0f} GB of a {chip.name} when {numbers} chips '
      'share a model; take more chips or fewer bits for a weight'
    )
