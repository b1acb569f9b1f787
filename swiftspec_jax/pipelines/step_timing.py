"""How long the programs of a round take, where what to run depends on it."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_NUM_TIMINGS = 8  # of each program


def least_seconds(
  programs: Mapping[Any, Callable[[], Callable[[], Any]]],
  state: Callable[[], Any],
) -> dict[Any, float]:
  """Times programs in turn, as other work can disturb for a while.

  Args:
    programs: what prepares each of them, and returns what is timed.
    state: returns what preparations may leave unfinished.
  """
  least = dict.fromkeys(programs, math.inf)
  for turn in range(_NUM_TIMINGS + 1):
    for name, prepare in programs.items():
      enqueue = prepare()
      jax.block_until_ready(state())
      start = time.perf_counter()
      jax.block_until_ready(enqueue())
      if turn:  # the first one compiles
        least[name] = min(least[name], time.perf_counter() - start)
  return least
