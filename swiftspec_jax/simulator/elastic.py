"""Serving with elastic sequence parallelism, in virtual time.

LoongServe (Wu et al., arXiv 2404.09526), beside one group of all instances.
Room is reserved for the whole of a request, so that none is ever stopped.

Legend: n requests, m instances.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.planning import elastic
from swiftspec_jax.serving.arrivals import Arrivals


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticCosts:
  """Seconds of instances, and their memory.

  Attributes:
    prefill: costs of prefill for up to m instances.
    decode: seconds of a decode step without rows.
    exchange: seconds that each further instance adds to a decode step.
    row: seconds that each row of a master adds.
    kv_token: seconds to read the keys and values of a token.
    move_token: seconds to send them to another instance.
    room: tokens that an instance has room for.
    batch_tokens: prompt tokens for each instance from which on more of them
      make a step longer in proportion.
  """

  prefill: elastic.PrefillCosts
  decode: float
  exchange: float
  row: float
  kv_token: float
  move_token: float
  room: int
  batch_tokens: int

  def decode_seconds(self, num_rows: int, kept: np.ndarray, masters: int):
    """Returns the seconds of a decode step.

    Args:
      num_rows: rows.
      kept: i64[m] tokens on each instance.
      masters: instances that share the rows.
    """
    rows = -(-num_rows // masters)
    # Those that hold keys and values take part, too.
    number = max(masters, int(np.count_nonzero(kept)))
    fixed = self.decode + self.exchange * (number - 1)
    return fixed + self.row * rows + self.kv_token * int(kept.max(initial=0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elastic:
  """The scheduler of the paper.

  Attributes:
    scales_up: whether idle instances take rows of large batches.
    keeps_fewest: whether the fewest instances keep the keys and values after a
      prefill; else all that took part do, as evenly as they can.
  """

  scales_up: bool = True
  keeps_fewest: bool = True


@dataclasses.dataclass(kw_only=True)
class _Row:
  """A request that decodes."""

  request: int
  left: int  # tokens to emit
  kept: np.ndarray  # i64[m] tokens reserved on each instance


def unloaded_seconds(arrivals: Arrivals, costs: ElasticCosts) -> np.ndarray:
  """Returns f64[n], the best latency of each request alone."""
  found = []
  for prompt, output in _sizes(arrivals):
    width = costs.prefill.fastest([prompt])
    first = costs.prefill.seconds([prompt], width)
    step = costs.decode_seconds(1, np.array([prompt + output]), 1)
    found.append(first + step * (output - 1))
  return np.array(found)


def simulate_group(
  arrivals: Arrivals,
  costs: ElasticCosts,
  num_instances: int,
  chunk_tokens: int | None = None,
  num_keeping: int | None = None,
) -> np.ndarray:
  """Serves all requests with one group of instances, prompts first.

  Args:
    arrivals: arrivals of the requests.
    costs: costs of the instances.
    num_instances: m.
    chunk_tokens: tokens of a step that reads a part of a prompt beside the rows
      that decode; None reads whole prompts in steps of their own.
    num_keeping: instances that decode and keep all keys and values. Each step
      that reads prompts takes these or more, as `PrefillCosts.fastest` says.
      None: all instances keep some, and all are in each step.

  Returns:
    f64[n] seconds from arrival to end.

  Raises:
    UserError: a request does not fit, or a number of instances has no costs.
  """
  num_keeping = num_keeping or num_instances
  numbers = range(num_keeping, num_instances + 1)
  _check(arrivals, costs, num_keeping, numbers)
  sizes, times = _sizes(arrivals), arrivals.times
  ends, time, free = np.zeros(len(times)), 0.0, costs.room * num_keeping
  waiting, reading, rows = list(range(len(times))), {}, {}
  while waiting or reading or rows:
    # Whole prompts, first come first served, while they fit.
    most = chunk_tokens or costs.batch_tokens * num_instances
    while (
      waiting
      and times[waiting[0]] <= time
      and sum(sizes[waiting[0]]) <= free
      and sum(reading.values()) < most
    ):
      request = waiting.pop(0)
      reading[request] = sizes[request][0]
      free -= sum(sizes[request])
    if not reading and not rows:
      time = max(time, times[waiting[0]])
      continue
    seconds, done, budget = 0.0, [], most
    parts, starts = [], []
    for request, left in list(reading.items()):
      part = left if chunk_tokens is None else min(left, max(budget, 0))
      parts.append(part)
      starts.append(sizes[request][0] - left)
      budget -= part
      reading[request] = left - part
      if part == left:
        del reading[request]
        done.append(request)
    if parts:
      number = costs.prefill.fastest(parts, starts, numbers)
      seconds = costs.prefill.seconds(parts, number, starts)
    if rows and (chunk_tokens is not None or not seconds):
      kept = sum(sum(sizes[request]) - left for request, left in rows.items())
      share = np.full(num_keeping, kept / num_keeping)
      seconds += costs.decode_seconds(len(rows), share, num_keeping)
      rows = {request: left - 1 for request, left in rows.items()}
    time += seconds
    rows |= {request: sizes[request][1] - 1 for request in done}
    for request in [request for request, left in rows.items() if left <= 0]:
      ends[request] = time
      free += sum(sizes[request])
      del rows[request]
  return ends - times


def simulate_elastic(
  arrivals: Arrivals,
  costs: ElasticCosts,
  num_instances: int,
  policy: Elastic = Elastic(),
) -> np.ndarray:
  """Serves all requests with groups that change in every step.

  Args:
    arrivals: arrivals of the requests.
    costs: costs of the instances.
    num_instances: m.
    policy: parts of the scheduler.

  Returns:
    f64[n] seconds from arrival to end.

  Raises:
    UserError: a request does not fit, or a number of instances has no costs.
  """
  _check(arrivals, costs, num_instances, range(1, num_instances + 1))
  cluster = Cluster(arrivals, costs, num_instances, policy)
  while cluster.advance():
    pass
  return cluster.ends - arrivals.times


class Cluster:
  """Instances, and what they do.

  An instance reads prompts in a group, or has a part in the one group that
  decodes, or is idle. Rows stand still while an instance that keeps some of
  their tokens reads.
  """

  def __init__(self, arrivals, costs, num_instances, policy):
    self._times, self._sizes = arrivals.times, _sizes(arrivals)
    self._costs, self._policy = costs, policy
    self._number = num_instances
    self._waiting = list(range(len(arrivals)))
    self._prefills: list[tuple[float, elastic.PrefillGroup]] = []
    self._rows: list[_Row] = []
    self._stepping: list[_Row] = []
    self._step_end: float | None = None  # of the group that decodes
    self._masters: set[int] = set()
    self._time = 0.0
    self.ends = np.zeros(len(arrivals))

  def advance(self) -> bool:
    """Goes to the next event; returns whether there was one."""
    upcoming = [end for end, _ in self._prefills]
    if self._step_end is not None:
      upcoming.append(self._step_end)
    arriving = (self._times[i] for i in self._waiting)
    upcoming += [x for x in arriving if x > self._time][:1]
    if not upcoming:
      return False
    self._time = min(upcoming)
    self._end_prefills()
    self._end_step()
    self._start_prefills()
    self._start_step()
    return True

  @property
  def kept(self) -> np.ndarray:
    """i64[m] tokens reserved on each instance."""
    none = np.zeros(self._number, np.int64)
    return sum((row.kept for row in self._rows), none)

  def _reading(self) -> set[int]:
    return {i for _, group in self._prefills for i in group.instances}

  def _idle(self) -> list[int]:
    holders = np.flatnonzero(self.kept).tolist()
    busy = {*holders, *self._masters, *self._reading()}
    return [i for i in range(self._number) if i not in busy]

  def _end_prefills(self) -> None:
    for end, group in [x for x in self._prefills if x[0] <= self._time]:
      self._prefills.remove((end, group))
      free = np.zeros(self._number, np.int64)
      members = list(group.instances)
      free[members] = self._costs.room - self.kept[members]
      for request in group.requests:
        prompt, output = self._sizes[request]
        kept = self._place(prompt + output, free, len(group.instances))
        free -= kept
        self._rows.append(_Row(request=request, left=output - 1, kept=kept))
    self._drop_ended()

  def _place(self, num_tokens: int, free: np.ndarray, width: int) -> np.ndarray:
    """Returns where the tokens of a request stay after its prefill."""
    if not self._policy.keeps_fewest:
      even = np.where(free > 0, -(-num_tokens // width), 0)
      if (even <= free).all():
        return even
    # A group's prompts are packed: first where others are kept already.
    used = (free > 0) & (free < self._costs.room)
    kept = elastic.place(num_tokens, np.where(used, free, 0))
    return elastic.place(num_tokens, free) if kept is None else kept

  def _end_step(self) -> None:
    if self._step_end is None or self._step_end > self._time:
      return
    self._step_end, self._masters = None, set()
    for row in self._stepping:
      row.left -= 1
    self._drop_ended()

  def _drop_ended(self) -> None:
    for row in [row for row in self._rows if row.left <= 0]:
      self.ends[row.request] = self._time
      self._rows.remove(row)

  def _start_prefills(self) -> None:
    arrived = [i for i in self._waiting if self._times[i] <= self._time]
    if not arrived:
      return
    instances = self._idle()
    most = self._costs.batch_tokens * max(len(instances), 1)
    lengths, total = [], 0
    for request in arrived:
      if total >= most:
        break
      lengths.append(sum(self._sizes[request]))
      total += lengths[-1]
    delay = 0.0
    if self._step_end is None:
      delay = self._take_instances(instances, lengths)
    if not instances:
      return
    rooms = self._costs.room - self.kept[instances]
    plan = elastic.plan_prefills(lengths, rooms, self._costs.prefill)
    for group in plan:
      requests = tuple(arrived[i] for i in group.requests)
      prompts = [self._sizes[request][0] for request in requests]
      seconds = self._costs.prefill.seconds(prompts, len(group.instances))
      placed = elastic.PrefillGroup(
        requests=requests,
        instances=tuple(instances[i] for i in group.instances),
        seconds=seconds + delay,
      )
      self._prefills.append((self._time + placed.seconds, placed))
      for request in requests:
        self._waiting.remove(request)

  def _take_instances(self, idle: list[int], lengths: Sequence[int]) -> float:
    """Frees instances that decode while that pays; returns the seconds."""
    delay = 0.0
    while True:
      kept = self.kept
      holders = np.array([*{*np.flatnonzero(kept)} - self._reading()], int)
      if not len(holders):
        return delay
      least = int(holders[kept[holders].argmin()])
      others = [int(i) for i in holders if i != least]
      free = self._costs.room - kept[others]
      seconds = self._costs.move_token * int(kept[least])
      if kept[least] > free.sum():
        if not idle and self._pays_to_stop(least, lengths):
          idle.append(least)
        return delay
      if seconds >= self._gain(idle, lengths):
        return delay
      self._move(least, others)
      idle.append(least)
      delay += seconds

  def _pays_to_stop(self, instance: int, lengths: Sequence[int]) -> bool:
    """Returns whether rows should stand still for prompts (section 5.1)."""
    rows = [row for row in self._rows if row.kept[instance]]
    step = self._costs.decode_seconds(len(rows), self.kept, 1)
    wait = step * float(np.mean([row.left for row in rows]))
    seconds = self._costs.prefill.seconds(lengths, 1)
    outputs = [self._sizes[row.request][1] for row in rows]
    gain = sum(wait / length for length in lengths)
    return gain > sum(seconds / output for output in outputs)

  def _gain(self, idle: list[int], lengths: Sequence[int]) -> float:
    """Returns the seconds that one more instance saves the prompts."""
    if not idle or sum(lengths) > self._costs.room * len(idle):
      return np.inf
    before, after = (
      self._costs.prefill.seconds(lengths, len(idle) + more) for more in (0, 1)
    )
    return before - after

  def _move(self, source: int, others: list[int]) -> None:
    for row in self._rows:
      number = int(row.kept[source])
      free = self._costs.room - self.kept[others]
      row.kept[source] = 0
      row.kept[others] += elastic.place(number, free)

  def _start_step(self) -> None:
    reading = [*self._reading()]
    rows = [row for row in self._rows if not row.kept[reading].any()]
    if self._step_end is not None or not rows:
      return
    kept = sum((row.kept for row in rows), np.zeros(self._number, np.int64))
    count, masters = len(rows), np.flatnonzero(kept).tolist()
    if self._policy.scales_up:
      masters += self._idle()
    seconds = [
      self._costs.decode_seconds(count, kept, number)
      for number in range(1, len(masters) + 1)
    ]
    best = int(np.argmin(seconds))
    self._masters = set(masters[: best + 1])
    self._stepping = rows
    self._step_end = self._time + seconds[best]


def _sizes(arrivals: Arrivals) -> list[tuple[int, int]]:
  """Returns the tokens of prompts and outputs."""
  return list(
    zip(
      arrivals.prompt_tokens.tolist(),
      arrivals.output_tokens.tolist(),
      strict=True,
    )
  )


def _check(arrivals, costs, num_instances, numbers):
  costs.prefill.check(numbers)
  longest = max(map(sum, _sizes(arrivals)), default=0)
  if longest > costs.room * num_instances:
    raise errors.UserError(
      f'a request of {longest} tokens is more than the '
      f'{costs.room * num_instances} tokens of {num_instances} instances'
    )
