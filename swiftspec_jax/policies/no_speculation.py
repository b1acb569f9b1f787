"""Plain decoding."""

import numpy as np

from swiftspec_jax import policies


class NoSpeculation(policies.Policy):
  """Never drafts."""

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    return policies.DraftPlan(lengths=np.zeros(view.num_rows, np.int64))
