"""How probable the leaves of a draft forward must be to be worth its time.

A round of T seconds emits E tokens of a row. One more forward of the draft
takes `t` seconds and adds as many tokens at most as its leaves are probable
together. It pays where that is more than E t / T: the tokens that the same time
yields otherwise. Where a forward runs beside the target, only the share of its
time that sticks out counts.
"""

from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafting.trees.round_rates import RoundRates
from swiftspec_jax.pipelines.tree_sizes import StepTimes


def min_mass(
  rates: RoundRates, times: StepTimes, tree: TreeConfig, *, is_async: bool
) -> float:
  """Returns the probability that leaves must have together.

  Args:
    rates: means of the rounds so far.
    times: seconds of the steps.
    tree: sizes of all trees.
    is_async: whether forwards run beside the target.
  """
  num_beside, more = 0, times.draft_seconds
  if is_async:
    num_beside = tree.num_draft_steps
    hidden = times.target_seconds[tree.num_nodes] / max(num_beside, 1)
    more = max(more - hidden, 0.0)
  seconds = times.round_seconds(tree.num_nodes, num_beside, rates.num_forwards)
  return min(rates.num_tree_tokens * more / seconds, 1.0)
