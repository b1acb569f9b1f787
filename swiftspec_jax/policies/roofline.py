"""As many draft tokens as a step takes along for almost nothing.

The rule of SSSD (arXiv 2411.05894): up to the point where computing takes as
long as reading the weights, tokens are nearly free, and a batch of `b` rows has
1 / b of them each. Here the costs of the steps say where that point is.
"""

import numpy as np

from swiftspec_jax import cost_model, policies

_SLACK = 0.1  # by which the target's part of a step may become longer


class Roofline(policies.Policy):
  """Gives all rows the longest draft within a slack of the plain step.

  Knows nothing of the acceptance; `Goodput` weighs that, too.
  """

  def __init__(self, costs: cost_model.CostModel):
    """Takes the seconds of a step."""
    self._costs = costs

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    return policies.DraftPlan(
      lengths=np.minimum(view.limits, self._length(view))
    )

  def _length(self, view: policies.StepView) -> int:
    if not view.num_rows:
      return 0
    buckets = view.buckets
    sizes = view.num_rows * (1 + buckets.length_array)
    sizes = sizes[sizes <= buckets.max_query_tokens]
    seconds = self._costs.predict(
      buckets.pad_rows(view.num_rows),
      buckets.computed_tokens(view.num_rows, sizes),
      int(view.kv_lengths.sum()),
      0,
    ).target
    is_free = seconds <= (1 + _SLACK) * seconds[0]
    return int(buckets.length_array[: len(sizes)][is_free].max())
