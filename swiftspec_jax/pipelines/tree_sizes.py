"""How many nodes to send and how many draft forwards to run, round by round.

The nodes of a proposal come most probable first. So a round tells what it
would have accepted with fewer nodes or fewer forwards. That and the measured
step times give the expected tokens per second of all sizes, and rounds without
the draft give their own.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from swiftspec_jax import types
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafting.texts import text_lookup
from swiftspec_jax.pipelines.tree_acceptance import TreeAcceptance

_SMALLEST = 4  # nodes of a tree
_DECAY = 0.9  # weight of a round against the one after it
_TRIAL = 3.0  # paused rounds that the measured times count as
_PAUSE_DECAY = 0.97  # weight of a paused round against the one after it
_HYSTERESIS = 1.03  # gain that is worth a change
# What a round says of the speed of its kind, and of that of the other kind.
_OWN_SPEED, _OTHER_SPEED = 0.1, 0.03
_PROBE_EVERY = (32, 1024)  # rounds at least, and at most
_FIRST_PROBE = 2  # rounds at least
# Of the time that probes may cost, the first one and later ones.
_FIRST_SHARE, _PROBE_SHARE = 0.1, 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Of one round: nodes sent, draft forwards for them."""

  num_nodes: int
  num_steps: int
  ends_pause: bool = False  # a probe out of a pause


# Without the draft: plain decoding, or prompt lookup with lengths of its own.
PAUSE = Sizes(num_nodes=1, num_steps=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
  """Measured seconds of the programs of a round."""

  target_seconds: Mapping[int, float]  # by number of nodes
  pause_seconds: Mapping[int, float]  # by number of tokens looked up
  draft_seconds: float  # of one forward
  advance_seconds: float  # from a verdict to the proposal, with one forward
  catch_up_seconds: float  # of the draft, after a pause

  def round_seconds(
    self, num_nodes: int, num_beside: int, num_waited: float
  ) -> float:
    """Returns the seconds of a round with trees.

    Args:
      num_nodes: nodes to verify.
      num_beside: draft forwards beside the target; 0 in serial mode.
      num_waited: draft forwards for which the target waits.
    """
    growth = max(
      self.target_seconds[num_nodes], num_beside * self.draft_seconds
    )
    handoff = max(self.advance_seconds - self.draft_seconds, 0.0)
    return growth + handoff + num_waited * self.draft_seconds


def node_buckets(tree_config: TreeConfig) -> tuple[int, ...]:
  """Returns the numbers of nodes that are compiled, in ascending order."""
  if not tree_config.is_adaptive:
    return (tree_config.num_nodes,)
  buckets = {1, tree_config.num_nodes}
  num_nodes = _SMALLEST
  while num_nodes < tree_config.num_nodes:
    buckets.add(num_nodes)
    num_nodes *= 2
  return tuple(sorted(buckets))


class TreeSizes:
  """The sizes of the next round; adapts them once it knows the step times."""

  def __init__(self, tree_config: TreeConfig, *, is_async: bool):
    self.current = self._largest = Sizes(
      num_nodes=tree_config.num_nodes, num_steps=tree_config.num_draft_steps
    )
    if tree_config.is_adaptive and tree_config.num_nodes == 1:
      self.current = self._largest = PAUSE  # a root alone needs no draft
    self._is_async = is_async
    # Chains of the text are deep without forwards, so that a round does not
    # tell what fewer forwards would have done.
    self._has_chains = bool(text_lookup.kinds_of_tree(tree_config))
    # A tree of d forwards is d levels deep.
    self._is_capped = not is_async and not self._has_chains
    self._buckets = node_buckets(tree_config)
    self._times: StepTimes | None = None
    self._acceptance = TreeAcceptance(self._buckets)
    # Of paused rounds: how many, their tokens, and their seconds.
    self._pause = np.zeros(3)
    # By whether rounds are paused: their seconds as a share of those measured.
    self._slowness = {False: 1.0, True: 1.0}
    self._num_forwards = 0.0  # mean of those for which the target waits
    self._num_rounds = 0  # since the last probe

  @property
  def is_timed(self) -> bool:
    return self._times is not None

  def start(self, times: StepTimes) -> None:
    """Adapts the sizes to these times from now on."""
    if times is self._times:
      return
    is_first, self._times = not self.is_timed, times
    if is_first:
      self._pause = _TRIAL * np.array([1.0, 1.0, times.pause_seconds[0]])
      # A short text that trees do not help must not pay for finding out.
      self.current = PAUSE
    self._plan_probes()

  def next(self) -> Sizes:
    """Returns the sizes of the next proposal."""
    if not self.is_timed:
      return self.current
    self._num_rounds += 1
    if self._num_rounds < self._interval:
      return self.current
    self._num_rounds = 0
    if self.current == PAUSE:  # copying may have ended, so that others can pay
      self._plan_probes()
    return next(self._probes)

  def observe(
    self,
    sizes: Sizes,
    reports: Sequence[types.StepReport],
    seconds: float | None = None,
  ) -> None:
    """Takes what came of a round, which may be read late.

    Args:
      sizes: sizes of the round.
      reports: reports of the rows.
      seconds: duration of the round; None if it did more than others do.
    """
    if not self.is_timed or not reports:
      return
    if seconds is not None:
      self._learn_speed(sizes, reports, seconds)
    if sizes == PAUSE:
      self._learn_pause(reports)
      return
    if sizes.ends_pause:
      self._acceptance.end_pause()
      self._num_forwards = 0.0
    else:
      mean = sum(report.num_forwards for report in reports) / len(reports)
      self._num_forwards += (1 - _DECAY) * (mean - self._num_forwards)
    # The others sent their root alone, as they had no tree yet.
    with_trees = [report for report in reports if report.num_drafted]
    if with_trees:
      self._acceptance.observe(
        sizes.num_nodes,
        [report.path for report in with_trees],
        [self._depth(sizes, report) for report in with_trees],
      )
    self._choose()

  def _learn_speed(self, sizes, reports, seconds) -> None:
    """Takes that other work slows all rounds, and one kind more than others."""
    is_pause = sizes == PAUSE
    if is_pause:
      measured = self._paused_seconds(reports)
    else:
      measured = self._tree_seconds(sizes)
    change = math.log(seconds / measured / self._slowness[is_pause])
    change = min(max(change, -1.0), 1.0)
    self._slowness[is_pause] *= math.exp(_OWN_SPEED * change)
    self._slowness[not is_pause] *= math.exp(_OTHER_SPEED * change)

  def _paused_seconds(self, reports) -> float:
    longest = max(report.num_drafted for report in reports)
    return self._times.pause_seconds[longest]

  def _learn_pause(self, reports) -> None:
    num_tokens = sum(len(report.token_ids) for report in reports)
    seconds = self._paused_seconds(reports)
    new = np.array([1.0, num_tokens / len(reports), seconds])
    self._pause = _PAUSE_DECAY * self._pause + new
    if self.current != PAUSE:  # was a probe
      self._choose()

  def _depth(self, sizes, report) -> int:
    """Returns how many nodes a path of the row's tree may have."""
    if self._is_capped:
      return sizes.num_steps
    if self._is_async and sizes.ends_pause:
      return report.num_levels  # a new tree has not its full depth
    return sizes.num_nodes - 1

  def _choose(self) -> None:
    survivals = self._acceptance.survivals()
    rates = {PAUSE: self._pause_rate()}
    for sizes in self._options():
      i = self._buckets.index(sizes.num_nodes)
      num_levels = sizes.num_steps if self._is_capped else None
      num_tokens = 1 + survivals[i, :num_levels].sum()
      rates[sizes] = num_tokens / self._seconds(sizes)
    best = max(rates, key=rates.get)
    gain = 1.0 if best == PAUSE else _HYSTERESIS
    if rates[best] > gain * rates.get(self.current, 0.0):
      self.current = best
      self._plan_probes()

  def _pause_rate(self) -> float:
    """Returns the tokens per second of a row without the draft."""
    num_rounds, num_tokens, _ = self._pause
    return num_tokens / num_rounds / self._seconds(PAUSE)

  def _options(self) -> Iterable[Sizes]:
    """Yields all sizes to choose from, but those without the draft."""
    most = max(self._largest.num_steps, 1)
    for bucket in self._buckets:
      if bucket == 1:
        continue
      steps = range(1, most + 1) if self._is_capped else (most,)
      if self._is_async:
        # As many as fit into the target's step (the paper's rule), and one
        # more.
        target = self._times.target_seconds[bucket]
        fit = max(int(target / self._times.draft_seconds), 1)
        steps = sorted({min(fit, most), min(fit + 1, most)})
      for num_steps in steps:
        yield Sizes(num_nodes=bucket, num_steps=num_steps)

  def _seconds(self, sizes: Sizes) -> float:
    """Returns how long a round takes."""
    if sizes == PAUSE:
      num_rounds, _, seconds = self._pause
      return self._slowness[True] * seconds / num_rounds
    return self._slowness[False] * self._tree_seconds(sizes)

  def _tree_seconds(self, sizes: Sizes) -> float:
    """Returns how long a round with trees took when steps were measured."""
    num_forwards = (0, sizes.num_steps)
    if self._is_async:
      num_forwards = (sizes.num_steps, self._num_forwards)
    return self._times.round_seconds(sizes.num_nodes, *num_forwards)

  def _plan_probes(self) -> None:
    """Chooses the sizes that tell about others, and rounds between them."""
    now = self._seconds(self.current)
    if self.current != PAUSE:
      probes, cost = [self._largest], self._seconds(self._largest) - now
      if len(self._times.pause_seconds) > 1:
        # What lookup alone would give, a tree does not tell.
        probes.insert(0, PAUSE)
        cost = max(cost, self._times.catch_up_seconds)
    else:
      gains = {}
      for sizes in self._options():
        num_levels = sizes.num_nodes - 1
        if not self._has_chains:
          num_levels = min(num_levels, sizes.num_steps)
        best_rate = (1 + num_levels) / self._seconds(sizes)
        if best_rate > _HYSTERESIS * self._pause_rate():
          gain = best_rate - self._pause_rate()
          gains[sizes] = gain / self._cost(sizes)
      if not gains:
        self._probes, self._interval = itertools.repeat(PAUSE), _PROBE_EVERY[0]
        return
      best = max(gains, key=gains.get)
      if self._acceptance.is_new:  # the first tree has to tell about all
        best = self._largest
      probes = [dataclasses.replace(best, ends_pause=True)]
      cost = self._cost(best)
    self._probes = itertools.cycle(probes)
    share, (least, most) = _PROBE_SHARE, _PROBE_EVERY
    if self.current == PAUSE and self._acceptance.is_new:
      share, least = _FIRST_SHARE, _FIRST_PROBE
    self._interval = np.clip(cost / (share * now), least, most)

  def _cost(self, sizes: Sizes) -> float:
    """Returns the seconds that a probe takes longer than a paused round."""
    more = self._seconds(sizes) - self._seconds(PAUSE)
    return max(more, 0.0) + self._times.catch_up_seconds
