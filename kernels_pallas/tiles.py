"""Sizes of blocks, and what kernels have as a frozen `Config` of them."""

import dataclasses
import functools
from typing import Any

LANES = 128


def whole_lanes(size: int, limit: int) -> int:
  """Returns the largest divisor in whole lanes up to the limit, else all."""
  fitting = range(LANES, min(size, limit) + 1, LANES)
  return max((n for n in fitting if size % n == 0), default=size)


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
