"""The same length always."""

import numpy as np

from swiftspec_jax import errors, policies


class FixedLength(policies.VerifyAll):
  """Drafts `length` tokens for each row, whatever the load."""

  def __init__(self, length: int):
    if length < 0:
      raise errors.UserError(f'length must be at least 0, got {length}')
    self._length = length

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    return policies.DraftPlan(lengths=np.minimum(view.limits, self._length))
