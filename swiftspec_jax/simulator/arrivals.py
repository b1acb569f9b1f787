"""When requests arrive, and how long they are.

The same seed gives the same requests, in the same order and with gaps in the
same proportions, at every rate.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.runtime import input_files

_STEP_SECONDS = 20.0
_STEP_HEIGHT = 0.5  # the rate is that much higher and lower in turns
_BURST_SIZE = 16  # requests, on average


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Arrivals:
  """Open-loop load: nobody waits for an answer before asking again.

  Attributes:
    times: f64[n] seconds, ascending.
    prompt_tokens: i64[n].
    output_tokens: i64[n] after which the answers end.
  """

  times: np.ndarray
  prompt_tokens: np.ndarray
  output_tokens: np.ndarray

  def __len__(self) -> int:
    return len(self.times)


def poisson(rate: float, num_requests: int, seed: int) -> np.ndarray:
  """Returns times of independent requests, `rate` a second on average."""
  return np.cumsum(_unit_gaps(num_requests, seed)) / rate


def step(rate: float, num_requests: int, seed: int) -> np.ndarray:
  """Returns times whose rate jumps up and down around `rate`.

  For 20 seconds each it is 1.5 times and half of `rate`.
  """
  # Unit-rate times are the area under the rate up to the time looked for.
  areas = np.cumsum(_unit_gaps(num_requests, seed))
  high, low = ((1 + s * _STEP_HEIGHT) * rate * _STEP_SECONDS for s in (1, -1))
  periods, rest = np.divmod(areas, high + low)
  within = np.interp(rest, [0, high, high + low], [0, 1, 2])
  return (2 * periods + within) * _STEP_SECONDS


def burst(rate: float, num_requests: int, seed: int) -> np.ndarray:
  """Returns times of requests that come 16 at once on average.

  The numbers are geometric, the gaps between bursts exponential.
  """
  starts = _generator(seed, 'bursts').random(num_requests) < 1 / _BURST_SIZE
  gaps = np.where(starts, _unit_gaps(num_requests, seed), 0.0)
  return np.cumsum(gaps) * _BURST_SIZE / rate


PATTERNS = {'poisson': poisson, 'step': step, 'burst': burst}


def draw_lengths(
  mean: int, spread: float, num_requests: int, seed: int, name: str
) -> np.ndarray:
  """Returns token counts i64[n] of at least 1.

  Args:
    mean: mean of the log-normal distribution.
    spread: sigma of the distribution; 0 makes all counts equal.
    num_requests: n.
    seed: seed of the draws.
    name: name that tells draws of the same seed apart.
  """
  normal = _generator(seed, name).standard_normal(num_requests)
  counts = mean * np.exp(spread * normal - spread**2 / 2)
  return np.maximum(np.rint(counts), 1).astype(np.int64)


def read_trace(path: pathlib.Path) -> Arrivals:
  """Reads arrivals from JSON lines.

  Args:
    path: each line is an object with `arrival` (seconds, not descending),
      `prompt_tokens` and `output_tokens`.

  Raises:
    UserError: the file cannot be read, is empty, or a line is not valid.
  """
  rows = [
    (
      _number(values, 'arrival', (int, float), 0, place),
      _number(values, 'prompt_tokens', (int,), 1, place),
      _number(values, 'output_tokens', (int,), 1, place),
    )
    for place, values in input_files.read_lines(path, 'a trace')
  ]
  if not rows:
    raise errors.UserError(f'{path} holds no arrivals')
  times, prompt_tokens, output_tokens = map(np.array, zip(*rows, strict=True))
  if (np.diff(times) < 0).any():
    raise errors.UserError(f'{path}: arrivals must not descend')
  return Arrivals(
    times=times.astype(float),
    prompt_tokens=prompt_tokens,
    output_tokens=output_tokens,
  )


def scaled(arrivals: Arrivals, rate: float) -> Arrivals:
  """Returns the arrivals, stretched in time to `rate` requests a second."""
  span = arrivals.times[-1] - arrivals.times[0]
  if span <= 0:
    raise errors.UserError(
      'arrivals at one moment have no rate; give no request rates for them'
    )
  factor = (len(arrivals) - 1) / span / rate
  times = (arrivals.times - arrivals.times[0]) * factor
  return dataclasses.replace(arrivals, times=times)


def _number(values: dict[str, Any], name: str, kinds, least, place: str):
  value = values.get(name)
  if isinstance(value, bool) or not isinstance(value, kinds) or value < least:
    kind = 'number' if float in kinds else 'whole number'
    raise errors.UserError(
      f'{place}: {name!r} must be a {kind} of at least {least}, got {value!r}'
    )
  return value


def _unit_gaps(num_requests: int, seed: int) -> np.ndarray:
  return _generator(seed, 'gaps').exponential(size=num_requests)


def _generator(seed: int, name: str) -> np.random.Generator:
  return np.random.default_rng([seed, *name.encode()])
