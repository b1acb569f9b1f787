"""How many nodes to send and how many draft forwards to run, round by round.

The nodes of a proposal come most probable first. So a round tells exactly what
it would have accepted with fewer nodes: the accepted ones among the first. That
and the measured step times give the expected tokens per second of each size.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from swiftspec_jax import types
from swiftspec_jax.config import TreeConfig

_SMALLEST = 4  # nodes
_DECAY = 0.95  # weight of a round against the one after it
_PROBE_EVERY = 32  # rounds; only the largest size tells about all of them
_HYSTERESIS = 1.03  # gain that is worth a change


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
  """Measured seconds of the programs of a round."""

  target_seconds: Mapping[int, float]  # by number of nodes
  draft_seconds: float  # of one forward


def node_buckets(tree_config: TreeConfig) -> tuple[int, ...]:
  """Returns the numbers of nodes that are compiled, in ascending order."""
  if not tree_config.is_adaptive:
    return (tree_config.num_nodes,)
  buckets = {tree_config.num_nodes}
  num_nodes = _SMALLEST
  while num_nodes < tree_config.num_nodes:
    buckets.add(num_nodes)
    num_nodes *= 2
  return tuple(sorted(buckets))


class TreeSizes:
  """The sizes of the next round; adapts them if the configuration says so."""

  def __init__(self, tree_config: TreeConfig, *, is_async: bool):
    self.num_nodes = tree_config.num_nodes
    self.num_draft_steps = tree_config.num_draft_steps
    self.times: StepTimes | None = None
    self._tree_config = tree_config
    self._is_async = is_async
    self._buckets = node_buckets(tree_config)
    self._num_rounds = 0
    # Sizes of the proposals that are being verified; a decoder that is never
    # read must not fill the memory.
    self._verified = collections.deque(maxlen=64)
    # [bucket, k]: rounds, recent ones weigh more, that accepted >= k nodes.
    size = (len(self._buckets), tree_config.num_nodes)
    self._survivals = np.zeros(size)

  def next_num_nodes(self) -> int:
    """Returns how many nodes to send next."""
    self._num_rounds += 1
    is_probe = self._num_rounds % _PROBE_EVERY == 0
    return self._buckets[-1] if is_probe else self.num_nodes

  def note_verified(self, num_nodes: int) -> None:
    """Notes that a proposal of this size is being verified."""
    self._verified.append(num_nodes)

  def reset(self) -> None:
    """Forgets the proposals whose reports will not come."""
    self._verified.clear()

  def observe(self, reports: Sequence[types.StepReport]) -> None:
    """Takes the reports of the oldest proposal that has none yet."""
    num_nodes = self._verified.popleft()
    if self.times is None:
      return
    # What was not seen for long counts little against a new probe.
    self._survivals *= _DECAY
    for i, bucket in enumerate(self._buckets):
      if bucket > num_nodes:
        break
      for report in reports:
        num_accepted = sum(node < bucket for node in report.path[1:])
        self._survivals[i, : num_accepted + 1] += 1 / len(reports)
    if reports:
      self._choose()

  def _choose(self) -> None:
    rates = {
      (bucket, num_steps): self._rate(i, bucket, num_steps)
      for i, bucket in enumerate(self._buckets)
      for num_steps in self._step_choices(bucket)
      if self._survivals[i, 0]
    }
    best = max(rates, key=rates.get)
    current = rates.get((self.num_nodes, self.num_draft_steps), 0.0)
    if rates[best] > current * _HYSTERESIS:
      self.num_nodes, self.num_draft_steps = best

  def _step_choices(self, bucket: int) -> Iterable[int]:
    most = max(self._tree_config.num_draft_steps, 1)
    if not self._is_async:
      return range(1, most + 1)
    # As many as fit into the target's step (the paper's rule), and one more.
    fit = int(self.times.target_seconds[bucket] / self.times.draft_seconds)
    return {min(max(fit, 1), most), min(max(fit, 1) + 1, most)}

  def _rate(self, i: int, bucket: int, num_steps: int) -> float:
    """Returns the expected tokens per second of a size."""
    shares = self._survivals[i, 1:] / self._survivals[i, 0]
    target = self.times.target_seconds[bucket]
    draft = num_steps * self.times.draft_seconds
    if self._is_async:
      return (1 + shares.sum()) / max(target, draft)
    # A tree of d forwards is d levels deep.
    return (1 + shares[:num_steps].sum()) / (target + draft)
