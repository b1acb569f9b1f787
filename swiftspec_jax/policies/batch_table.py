"""A length for each batch size, profiled once (Su et al., arXiv 2310.18813)."""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.policies import cost_model as cost_model_lib
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets


class BatchTable(policies.Policy):
  """Looks the length up by the number of rows.

  Knows neither the acceptance of the moment nor the contexts: the baseline that
  an adaptive policy has to beat.
  """

  def __init__(self, lengths: Mapping[int, int]):
    """Keeps the table.

    Args:
      lengths: draft length for each listed number of rows. A number between two
        of them counts as the larger one, a number above all as the largest.
    """
    if not lengths or min(lengths) < 1 or min(lengths.values()) < 0:
      raise errors.UserError(
        f'the table needs lengths >= 0 for numbers of rows >= 1, got {lengths}'
      )
    self.lengths = dict(sorted(lengths.items()))
    self._num_rows = list(self.lengths)

  @classmethod
  def profile(
    cls,
    costs: cost_model_lib.CostModel,
    buckets: StepBuckets,
    conditional_acceptance: Sequence[float],
    kv_length: int,
  ) -> 'BatchTable':
    """Makes the table of the best lengths for a known acceptance.

    Args:
      costs: model of the seconds of a step.
      buckets: declared sizes; the table has a line for each number of rows.
      conditional_acceptance: probability that a draft token is accepted if
        those before it are, for each position.
      kv_length: number of tokens in the cache of each row.
    """
    survival = np.cumprod(conditional_acceptance)
    table = {}
    for num_rows in buckets.rows:
      goodput = {}
      for length, steps in zip(
        buckets.lengths, buckets.draft_steps, strict=True
      ):
        num_tokens = num_rows * (length + 1)
        if length > len(survival) or num_tokens > buckets.max_query_tokens:
          break
        seconds = costs.predict(
          num_rows,
          buckets.computed_tokens(num_rows, num_tokens),
          num_rows * kv_length,
          steps,
        ).total
        goodput[length] = (1 + survival[:length].sum()) / seconds
      table[num_rows] = max(goodput, key=goodput.get)
    return cls(table)

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    index = bisect.bisect_left(self._num_rows, view.num_rows)
    num_rows = self._num_rows[min(index, len(self._num_rows) - 1)]
    lengths = np.minimum(view.limits, self.lengths[num_rows])
    return policies.DraftPlan(lengths=lengths)
