"""What kernels share that need all logits of a token on one device."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kernels_pallas import tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuConfig:
  """Tiles of a TPU kernel.

  Attributes:
    block_vocab: tokens of a tile, a multiple of 128.
    CANDIDATES: values that `experiments.kernels tune` tries.
  """

  CANDIDATES: ClassVar[dict[str, tuple[int, ...]]] = {
    'block_vocab': (4096, 8192, 16_384),
  }
  block_vocab: int = 8192

  def __post_init__(self):
    tiles.check_multiples(self, tiles.LANES, 'block_vocab')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuConfig:
  """Tiles of a GPU kernel.

  Attributes:
    block_vocab: tokens of a tile, a power of two.
    num_programs: most programs of a row, a power of two.
    num_warps: warps of a program.
    CANDIDATES: values that `experiments.kernels tune` tries.
  """

  CANDIDATES: ClassVar[dict[str, tuple[int, ...]]] = {
    'block_vocab': (512, 1024, 2048),
    'num_programs': (32, 64, 128),
    'num_warps': (4, 8),
  }
  block_vocab: int = 1024
  num_programs: int = 128
  num_warps: int = 4

  def __post_init__(self):
    tiles.check_powers(self, 'block_vocab', 'num_programs', 'num_warps')


def check(
  shape: tuple[int, ...],
  dtype: jax.typing.DTypeLike,
  *,
  most_tokens: int,
) -> None:
  """Raises NotImplementedError with the reason if a kernel cannot do it.

  Args:
    shape: [B, T, V] of the logits.
    dtype: dtype of the logits.
    most_tokens: largest T that the kernel can do.
  """
  if dtype != jnp.float32:
    raise NotImplementedError(f'dtype {dtype} is not float32')
  if shape[1] > most_tokens:
    raise NotImplementedError(f'{shape[1]} tokens are more than {most_tokens}')
