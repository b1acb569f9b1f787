"""How long the programs of a round take, where what to run depends on it."""

import collections
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from swiftspec_jax import hosts

_NUM_TIMINGS = 8  # of each program


def median_seconds(
  programs: Mapping[Any, Callable[[], Callable[[], Any]]],
  state: Callable[[], Any],
) -> dict[Any, float]:
  """Returns the median seconds of each program.

  The programs take turns, as other work can disturb for a while. Medians are
  nearer than the least times to what a step takes in between others.

  Args:
    programs: functions by program: each prepares its program and returns the
      function to time.
    state: function that returns the arrays that a preparation may leave
      unfinished.
  """
  seconds = collections.defaultdict(list)
  for turn in range(_NUM_TIMINGS + 1):
    for name, prepare in programs.items():
      enqueue = prepare()
      jax.block_until_ready(state())
      start = time.perf_counter()
      jax.block_until_ready(enqueue())
      if turn:  # the first one compiles
        seconds[name].append(time.perf_counter() - start)
  medians = [statistics.median(seconds[name]) for name in programs]
  # Where a process has no part in a program, that takes no time.
  slowest = map(max, zip(*hosts.exchange(medians), strict=True))
  return dict(zip(programs, slowest, strict=True))
