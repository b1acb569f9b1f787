"""How long the programs of a round take, where what to run depends on it."""

import collections
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from swiftspec_jax import buckets, hosts

_NUM_TIMINGS = 8  # of each program

# Prepares a program for idle rows that know texts of some tokens; returns the
# function to time.
Prepare = Callable[[int], Callable[[], Any]]


def median_seconds(
  programs: Mapping[Any, Prepare], capacity: int, state: Callable[[], Any]
) -> dict[Any, float]:
  """Returns the median seconds of each program, behind a warm-up.

  The programs take turns, as other work can disturb for a while. Medians are
  nearer than the least times to what a step takes in between others.

  Args:
    programs: functions by program.
    capacity: rows of the cache. Texts take half of them, as the shortest ones
      do that need this capacity.
    state: function that returns the arrays that a preparation may leave
      unfinished.
  """
  warm_up(programs, capacity, state)
  seconds = collections.defaultdict(list)
  for _ in range(_NUM_TIMINGS):
    for name, prepare in programs.items():
      seconds[name].append(_seconds(prepare, capacity // 2, state))
  medians = [statistics.median(seconds[name]) for name in programs]
  # Where a process has no part in a program, that takes no time.
  slowest = map(max, zip(*hosts.exchange(medians), strict=True))
  return dict(zip(programs, slowest, strict=True))


def warm_up(
  programs: Mapping[Any, Prepare], capacity: int, state: Callable[[], Any]
) -> None:
  """Runs each program with short and long texts; see `median_seconds`."""
  for length in buckets.text_lengths(capacity):
    for prepare in programs.values():
      _seconds(prepare, length, state)


def _seconds(
  prepare: Prepare, num_known: int, state: Callable[[], Any]
) -> float:
  enqueue = prepare(num_known)
  jax.block_until_ready(state())
  start = time.perf_counter()
  jax.block_until_ready(enqueue())
  return time.perf_counter() - start
