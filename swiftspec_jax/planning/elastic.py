"""Elastic sequence parallelism: which instances serve which requests.

LoongServe (Wu et al., arXiv 2404.09526). An instance is a group of devices with
a copy of the weights. Several of them can share the tokens of a batch.

Legend: n requests, m instances.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from swiftspec_jax import errors

Numbers = int | Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCosts:
  """Seconds of prefill: a + b * sum of lengths + c * sum of their squares.

  Of a prompt that is read in parts, each part adds to the squares what it makes
  of the whole.

  Attributes:
    coefficients: a, b and c by the number of instances. They are fitted for
      each number, as more instances exchange more.
  """

  coefficients: Mapping[int, tuple[float, float, float]]

  @classmethod
  def fit(
    cls, measured: Mapping[int, Sequence[tuple[Numbers, Numbers, float]]]
  ) -> 'PrefillCosts':
    """Returns the least squares of batches and their seconds.

    Args:
      measured: lengths, starts as in `seconds`, and seconds of batches by the
        number of instances, at least three batches for each.
    """
    found = {}
    for num_instances, batches in measured.items():
      sizes = [_sizes(lengths, starts) for lengths, starts, _ in batches]
      seconds = [seconds for _, _, seconds in batches]
      solution = np.linalg.lstsq(np.array(sizes), np.array(seconds))[0]
      found[num_instances] = tuple(solution.tolist())
    return cls(coefficients=found)

  def check(self, numbers: Iterable[int]) -> None:
    """Raises UserError if there are numbers of instances without costs."""
    missing = sorted(set(numbers) - set(self.coefficients))
    if missing:
      raise errors.UserError(
        f'costs of prefill have no coefficients for {missing[0]} instances, '
        f'only for {sorted(self.coefficients)}; measure them, or use no more '
        'instances'
      )

  def seconds(
    self, lengths: Numbers, num_instances: int, starts: Numbers = 0
  ) -> float:
    """Returns the seconds of a batch of prompts, or of parts of them.

    Args:
      lengths: tokens that are read, of n prompts.
      num_instances: instances that share them.
      starts: tokens in front of them, of n prompts or of each.
    """
    coefficients = self.coefficients[num_instances]
    return float(np.dot(coefficients, _sizes(lengths, starts)))

  def fastest(
    self,
    lengths: Numbers,
    starts: Numbers = 0,
    numbers: Iterable[int] | None = None,
  ) -> int:
    """Returns the number of instances that reads a batch in the least time.

    Section 5.2 of the paper: a batch gets more instances as long as they save
    more than it takes to free them. Here they are free. Of equal numbers it is
    the first one.

    Args:
      lengths: same as in `seconds`.
      starts: same as in `seconds`.
      numbers: numbers to choose from; all that have costs by default.
    """
    return min(
      self.coefficients if numbers is None else numbers,
      key=lambda number: self.seconds(lengths, number, starts),
    )


def _sizes(lengths: Numbers, starts: Numbers) -> np.ndarray:
  """Returns f64[3]: what the coefficients of a batch are multiplied with."""
  starts = np.asarray(starts, float)
  ends = starts + np.asarray(lengths, float)
  return np.array([1, (ends - starts).sum(), (ends**2 - starts**2).sum()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillGroup:
  """Prompts that some instances read as one batch.

  Attributes:
    requests: indices of the prompts.
    instances: indices of the instances.
    seconds: time that it takes.
  """

  requests: tuple[int, ...]
  instances: tuple[int, ...]
  seconds: float


def plan_prefills(
  lengths: Sequence[int], free_tokens: Sequence[int], costs: PrefillCosts
) -> list[PrefillGroup]:
  """Splits prompts and instances into groups with the least sum of latencies.

  Section 5.3 of the paper: prompts are sorted from long to short, instances
  from full to empty, and a group is a run of both. The plan is the best of that
  form. It may leave instances unused. Where the prompts do not fit, the last
  ones are left out.

  Args:
    lengths: tokens of n prompts, in the order of their arrival.
    free_tokens: room of m instances.
    costs: seconds for up to m instances.
  """
  room = np.sort(np.asarray(free_tokens))
  instances = np.argsort(free_tokens, kind='stable')
  for num_requests in range(len(lengths), 0, -1):
    known = np.asarray(lengths[:num_requests], float)
    requests = np.argsort(-known, kind='stable')
    runs = _best_runs(known[requests], room, costs)
    if runs is not None:
      return [
        PrefillGroup(
          requests=tuple(requests[first:end].tolist()),
          instances=tuple(instances[low:high].tolist()),
          seconds=costs.seconds(known[requests[first:end]], high - low),
        )
        for first, end, low, high in runs
      ]
  return []


def _best_runs(lengths, room, costs):
  """Returns runs (first, end, low, high), None if the prompts do not fit."""
  count, size = len(lengths), len(room)
  sums = np.concatenate([[0], np.cumsum(lengths)])
  squares = np.concatenate([[0], np.cumsum(lengths**2)])
  rooms = np.concatenate([[0], np.cumsum(room)])
  low, high = np.meshgrid(np.arange(size), np.arange(1, size + 1))
  low, high = low[low < high], high[low < high]
  fixed, linear, square = np.array(
    [costs.coefficients[width] for width in (high - low).tolist()]
  ).T
  best = np.full((count + 1, size + 1), np.inf)
  best[0] = 0
  choice = np.zeros((count + 1, size + 1, 2), int)
  for end in range(1, count + 1):
    first = np.arange(end)[:, None]
    tokens = sums[end] - sums[first]
    seconds = fixed + linear * tokens + square * (squares[end] - squares[first])
    total = best[first, low] + (end - first) * seconds
    total = np.where(tokens <= rooms[high] - rooms[low], total, np.inf)
    for width in range(1, size + 1):
      # Unless more instances help, the last one is left over.
      best[end, width] = best[end, width - 1]
      choice[end, width] = choice[end, width - 1]
      columns = np.flatnonzero(high == width)
      row, column = np.divmod(total[:, columns].argmin(), len(columns))
      if total[row, columns[column]] < best[end, width]:
        best[end, width] = total[row, columns[column]]
        choice[end, width] = row, columns[column]
  if not np.isfinite(best[count, size]):
    return None
  runs, end, width = [], count, size
  while end:
    first, column = choice[end, width]
    runs.append((int(first), end, int(low[column]), int(high[column])))
    end, width = int(first), int(low[column])
  return runs[::-1]


def place(num_tokens: int, free_tokens: Sequence[int]) -> np.ndarray | None:
  """Returns how many tokens each instance keeps: on the fewest that can.

  Section 4.1 of the paper: in a ring prefill every instance sees all keys and
  values, so that it may keep any of them, and nothing is sent twice. Those that
  keep some share them as evenly as their room allows.

  Args:
    num_tokens: tokens to keep.
    free_tokens: room of m instances.

  Returns:
    i64[m], or None if there is no room.
  """
  free = np.asarray(free_tokens)
  order = np.argsort(-free, kind='stable')
  rooms = np.cumsum(free[order])
  if num_tokens > rooms[-1]:
    return None
  count = int(np.searchsorted(rooms, num_tokens)) + 1
  kept, left = np.zeros(len(free), np.int64), num_tokens
  # The one with the least room first: it decides what the others take.
  for others, instance in zip(
    range(count, 0, -1), order[:count][::-1], strict=True
  ):
    kept[instance] = min(int(free[instance]), left // others)
    left -= int(kept[instance])
  return kept
