"""Sizes of the models whose shapes the kernels are compiled and measured at."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

_Spec = TypeVar('_Spec')

TENSOR_PARALLEL = (1, 4, 8)
NUM_TOKENS = (1, 8, 16)  # query tokens of a step
CONTEXTS = (500, 1_000, 8_192, 32_768)
BUILTIN = ('smollm2-135m', 'gemma3-270m')  # their dtype is float32, too


@dataclasses.dataclass(frozen=True)
class ModelShape:
  """What kernels see of a model.

  Attributes:
    name: name of the model.
    num_layers: L.
    embed_dim: D.
    ffw_dim: F.
    num_heads: number of query heads.
    num_kv_heads: G.
    head_dim: E.
    vocab_size: V.
    window: window of the sliding layers in tokens; None where there are none.
    activation: name of the activation of the gated layers.
  """

  name: str
  num_layers: int
  embed_dim: int
  ffw_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  vocab_size: int
  window: int | None = None
  activation: str = 'silu'

  @property
  def num_groups(self) -> int:
    """Query heads for each kv head."""
    return self.num_heads // self.num_kv_heads

  def kv_heads_of(self, num_shards: int) -> int:
    """Returns the kv heads of one of `num_shards` devices, padded."""
    return math.ceil(self.num_kv_heads / num_shards)

  def ffw_of(self, num_shards: int) -> int:
    """Returns the ffw columns of one of `num_shards` devices, padded."""
    return math.ceil(self.ffw_dim / num_shards)


def once_each(
  find: Callable[..., Iterable[tuple[str, _Spec]]],
) -> Callable[..., list[_Spec]]:
  """Returns a function of each shape once, with its users before its name.

  Args:
    find: function that yields users and their shapes, which are frozen
      dataclasses with a `name`; the same ones may come several times.
  """

  @functools.wraps(find)
  def arg_specs(*arguments):
    users: dict[_Spec, list[str]] = {}
    for user, spec in find(*arguments):
      users.setdefault(spec, []).append(user)
    return [
      dataclasses.replace(
        spec, name=f'{"+".join(dict.fromkeys(own))} {spec.name}'
      )
      for spec, own in users.items()
    ]

  return arg_specs


_gemma = functools.partial(ModelShape, activation='gelu_tanh')

# Name, L, D, F, query heads, G, E, V and window.
MODELS = (
  ModelShape('llama-1b', 16, 2048, 8192, 32, 8, 64, 128_256),
  ModelShape('llama-3b', 28, 3072, 8192, 24, 8, 128, 128_256),
  ModelShape('llama-8b', 32, 4096, 14_336, 32, 8, 128, 128_256),
  ModelShape('llama-70b', 80, 8192, 28_672, 64, 8, 128, 128_256),
  ModelShape('qwen2-72b', 80, 8192, 29_568, 64, 8, 128, 152_064),
  ModelShape('smollm2-135m', 30, 576, 1536, 9, 3, 64, 49_152),
  ModelShape('smollm2-1.7b', 24, 2048, 8192, 32, 32, 64, 49_152),
  _gemma('gemma3-270m', 18, 640, 2048, 4, 1, 256, 262_144, 512),
  _gemma('gemma3-4b', 34, 2560, 10_240, 8, 4, 256, 262_208, 1024),
  _gemma('gemma3-27b', 62, 5376, 21_504, 32, 16, 128, 262_208, 1024),
)
# What follows their attention is no gated layer, but experts.
WITH_SINKS = (
  ModelShape('gpt-oss-20b', 24, 2880, 2880, 64, 8, 64, 201_088, 128),
)
