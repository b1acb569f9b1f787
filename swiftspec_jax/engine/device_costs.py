"""Seconds of steps on each number of devices that an engine can give them."""

import collections
import time

from swiftspec_jax import errors
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.planning.elastic import PrefillCosts
from swiftspec_jax.step.program_sizes import ProgramSizes

_LEAST_SIZES = 3  # as many as coefficients
_REPEATS = 3  # of a step, of which the shortest counts


def measure(engine: Engine, sizes: ProgramSizes) -> PrefillCosts:
  """Measures invented steps; only without requests, and of compiled programs.

  Args:
    engine: engine whose `step_devices` have the numbers.
    sizes: declared sizes of the engine, of which those with all rows count.

  Raises:
    UserError: there are too few sizes for a fit.
  """
  num_rows = sizes.scheduler.buckets.max_rows
  programs = [
    flat
    for flat in (*sizes.all_plain(), *sizes.all_mixed())
    if flat.num_rows == num_rows
  ]
  if len(programs) < _LEAST_SIZES:
    raise errors.UserError(
      f'steps of {num_rows} rows have {len(programs)} sizes, and the fit needs '
      f'{_LEAST_SIZES}; declare more query tokens or contexts'
    )
  numbers = engine.step_devices.numbers
  batches, seconds = {}, collections.defaultdict(list)
  for _ in range(_REPEATS):
    for number in numbers:
      engine.trial(programs[0], 1, number)  # the change is no part of a step
      for flat in programs:
        start = time.perf_counter()
        step = engine.trial(flat, sizes.range_of(flat.context)[1])
        seconds[number, flat].append(time.perf_counter() - start)
        batches[flat] = step.num_query_tokens, step.starts
  return PrefillCosts.fit(
    {
      number: [
        (*batches[flat], min(seconds[number, flat])) for flat in programs
      ]
      for number in numbers
    }
  )
