"""Sizes of blocks, their limits, and what kernels have as a frozen `Config`."""

import dataclasses
import functools
from typing import Any

import jax

LANES = 128
LEAST_SIDE = 16  # of a product in Triton
_MAX_NUMBERS = 2**31  # of pages on GPUs: offsets have 32 bits


def whole_lanes(size: int, limit: int) -> int:
  """Returns the largest divisor in whole lanes up to the limit, else all."""
  fitting = range(LANES, min(size, limit) + 1, LANES)
  return max((n for n in fitting if size % n == 0), default=size)


def check_most(size: int, most: int, words: str) -> None:
  """Raises NotImplementedError if there are more than a kernel takes."""
  if size > most:
    raise NotImplementedError(f'{size} {words} are more than {most}')


def check_multiple(size: int, multiple: int, words: str) -> None:
  """Raises NotImplementedError if a number is no multiple."""
  if size % multiple:
    raise NotImplementedError(f'{size} {words} are no multiple of {multiple}')


def check_head_dim(head_dim: int) -> None:
  """Raises NotImplementedError for heads that no kernel in Triton takes."""
  if head_dim not in (16, 32, 64, 128, 256):
    raise NotImplementedError(
      f'head_dim {head_dim} is no power of two from 16 to 256'
    )


def check_pages(pages: jax.Array) -> None:
  """Raises NotImplementedError for pages that no kernel in Triton takes."""
  if pages.size > _MAX_NUMBERS:
    raise NotImplementedError(
      f'pages of {pages.size} numbers on a device are more than {_MAX_NUMBERS}'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Tiles of a kernel; fields are made by `number` or `power`."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, multiple = getattr(self, field.name), field.metadata['multiple']
      words = f'{field.name}={value!r} must be '
      if not isinstance(value, int) or value < 1 or value % multiple:
        raise ValueError(f'{words}a multiple of {multiple}')
      if field.metadata['is_power'] and value & (value - 1):
        raise ValueError(f'{words}a power of two')

  @classmethod
  def candidates(cls) -> dict[str, tuple[int, ...]]:
    """Returns values of each field, which `experiments.kernels tune` tries."""
    return {x.name: x.metadata['candidates'] for x in dataclasses.fields(cls)}


def number(
  candidates: tuple[int, ...],
  default: Any = dataclasses.MISSING,
  *,
  multiple: int = 1,
  is_power: bool = False,
) -> Any:
  """Returns a field of a `Config`, a positive multiple."""
  metadata = {'candidates': candidates, 'multiple': multiple}
  return dataclasses.field(
    default=default, metadata={**metadata, 'is_power': is_power}
  )


power = functools.partial(number, is_power=True)
