"""How probable the leaves of a draft forward must be to be worth its time.

A round of T seconds emits E tokens of a row. One more forward of the draft
takes `t` seconds and adds as many tokens at most as its leaves are probable
together. It pays where that is more than E t / T: the tokens that the same time
yields otherwise. Where a forward runs beside the target, only the share of its
time that sticks out counts.
"""

from collections.abc import Sequence

from swiftspec_jax import types
from swiftspec_jax.pipelines.tree_sizes import StepTimes

_DECAY = 0.9  # weight of a round against the one after it


class DepthPrice:
  """Follows the rounds of trees of one size.

  Attributes:
    min_mass: probability that leaves must have together.
  """

  def __init__(self, *, num_nodes: int, num_steps: int, is_async: bool):
    """Begins with a price of 0.

    Args:
      num_nodes: nodes of a tree that the target verifies.
      num_steps: most forwards of the draft in a round.
      is_async: whether they run beside the target.
    """
    self.min_mass = 0.0
    self._num_nodes, self._num_steps = num_nodes, num_steps
    self._is_async = is_async
    self._times: StepTimes | None = None
    # Means of a row and round: tokens, and forwards that the target waits for.
    self._num_tokens = 1.0
    self._num_forwards = 0.0 if is_async else float(num_steps)

  def start(self, times: StepTimes) -> None:
    """Takes the seconds of the steps from now on."""
    self._times = times

  def observe(self, reports: Sequence[types.StepReport]) -> None:
    """Takes the reports of a round."""
    reports = [report for report in reports if report.num_drafted]
    if self._times is None or not reports:
      return
    num_tokens = sum(len(report.token_ids) for report in reports)
    num_forwards = sum(report.num_forwards for report in reports)
    new = 1 - _DECAY
    self._num_tokens += new * (num_tokens / len(reports) - self._num_tokens)
    mean = num_forwards / len(reports)
    self._num_forwards += new * (mean - self._num_forwards)
    self.min_mass = min(self._num_tokens * self._price(), 1.0)

  def _price(self) -> float:
    """Returns t / T."""
    draft = self._times.draft_seconds
    target = self._times.target_seconds[self._num_nodes]
    if not self._is_async:
      more = max(self._num_forwards - 1, 0.0) * draft
      return draft / (target + self._times.advance_seconds + more)
    growth = self._num_steps * draft
    if growth <= target:
      return 0.0
    share = 1 - target / growth
    return share * draft / (growth + self._num_forwards * draft)
