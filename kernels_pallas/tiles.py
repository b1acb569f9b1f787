"""Sizes of blocks."""

from typing import Any

LANES = 128


def whole_lanes(size: int, limit: int) -> int:
  """Returns the largest divisor in whole lanes up to the limit, else all."""
  fitting = range(LANES, min(size, limit) + 1, LANES)
  return max((n for n in fitting if size % n == 0), default=size)


def check_powers(config: Any, *fields: str) -> None:
  """Raises ValueError unless these fields are powers of two."""
  for field in fields:
    value = getattr(config, field)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
      raise ValueError(f'{field}={value!r} must be a power of two')


def check_multiples(config: Any, multiple: int, *fields: str) -> None:
  """Raises ValueError unless these fields are positive multiples."""
  for field in fields:
    value = getattr(config, field)
    if not isinstance(value, int) or value < 1 or value % multiple:
      raise ValueError(f'{field}={value!r} must be a multiple of {multiple}')
