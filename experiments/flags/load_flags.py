"""Flags of load experiments, and what they stand for."""

import pathlib

from absl import flags

from swiftspec_jax import errors
from swiftspec_jax.cli.flags import policy_names
from swiftspec_jax.simulator import arrivals as arrivals_lib
from swiftspec_jax.simulator import load_metrics

_POLICIES = flags.DEFINE_list(
  'policies',
  ['none', 'always_1', 'always_3', 'always_5', 'table', 'goodput'],
  f'What to compare: {policy_names.HELP}',
)
_REQUEST_RATES = flags.DEFINE_list(
  'request_rates', ['2', '8', '32'], 'Requests per second.'
)
_SEEDS = flags.DEFINE_integer(
  'seeds', 1, 'How many seeds; results are their means.', lower_bound=1
)
_NUM_REQUESTS = flags.DEFINE_integer(
  'num_requests', 500, 'Requests of a run.', lower_bound=1
)
_ARRIVALS = flags.DEFINE_enum(
  'arrivals',
  'poisson',
  list(arrivals_lib.PATTERNS),
  'How requests come: independently, at a rate that jumps every 20 s, or in '
  'bursts of 16 on average.',
)
_TRACE = flags.DEFINE_string(
  'trace',
  None,
  'JSON lines with arrival (seconds), prompt_tokens and output_tokens. They '
  'stand in for drawn ones, stretched in time to each of the rates.',
)
_PROMPT_TOKENS = flags.DEFINE_integer(
  'prompt_tokens', 512, 'Mean length of prompts.', lower_bound=1
)
_OUTPUT_TOKENS = flags.DEFINE_integer(
  'output_tokens', 128, 'Mean length of outputs.', lower_bound=1
)
_LENGTH_SPREAD = flags.DEFINE_float(
  'length_spread',
  0.5,
  'Sigma of the log-normal distribution of both lengths; 0 makes all equal.',
  lower_bound=0.0,
)
_SLO_TTFT = flags.DEFINE_float(
  'slo_ttft', 1.0, 'Seconds to the first token that are still good.'
)
_SLO_TPOT = flags.DEFINE_float(
  'slo_tpot', 0.05, 'Seconds per further token that are still good.'
)


def policy_names() -> list[str]:
  """Returns the policies to compare."""
  return _POLICIES.value


def seeds() -> range:
  """Returns the seeds of the runs."""
  return range(_SEEDS.value)


def request_rates() -> list[float]:
  """Returns the requests per second to try.

  Raises:
    UserError: one is no positive number.
  """
  return positive_numbers('request_rates', _REQUEST_RATES.value)


def latency_target() -> load_metrics.LatencyTarget:
  """Returns what a request has to keep."""
  return load_metrics.LatencyTarget(ttft=_SLO_TTFT.value, tpot=_SLO_TPOT.value)


def arrivals(rate: float, seed: int) -> arrivals_lib.Arrivals:
  """Returns requests; the same ones, at other times, for every rate.

  Raises:
    UserError: the trace cannot be used.
  """
  if _TRACE.value is not None:
    trace = arrivals_lib.read_trace(pathlib.Path(_TRACE.value))
    return arrivals_lib.scaled(trace, rate)
  count, spread = _NUM_REQUESTS.value, _LENGTH_SPREAD.value
  return arrivals_lib.Arrivals(
    times=arrivals_lib.PATTERNS[_ARRIVALS.value](rate, count, seed),
    prompt_tokens=arrivals_lib.draw_lengths(
      _PROMPT_TOKENS.value, spread, count, seed, 'prompt'
    ),
    output_tokens=arrivals_lib.draw_lengths(
      _OUTPUT_TOKENS.value, spread, count, seed, 'output'
    ),
  )


def positive_numbers(flag: str, values: list[str]) -> list[float]:
  """Returns the numbers of a list flag.

  Raises:
    UserError: one is no positive number.
  """
  numbers = []
  for value in values:
    try:
      number = float(value)
    except ValueError:
      number = float('nan')
    if not 0 < number < float('inf'):
      raise errors.UserError(f'--{flag}: {value!r} must be a positive number')
    numbers.append(number)
  return numbers
