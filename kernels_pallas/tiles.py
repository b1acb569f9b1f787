"""Sizes of blocks."""

LANES = 128


def whole_lanes(size: int, limit: int) -> int:
  """Returns the largest divisor in whole lanes up to the limit, else all."""
  fitting = range(LANES, min(size, limit) + 1, LANES)
  return max((n for n in fitting if size % n == 0), default=size)
