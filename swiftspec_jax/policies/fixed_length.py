"""The same length always."""

import numpy as np

from swiftspec_jax import errors, policies


class FixedLength(policies.Policy):
  """Drafts `length` tokens for each row, 0 for plain decoding.

  Prompts that share a step come first, unless `drafts_first`. That is the
  baseline of published comparisons: drafts take their room from prompts.
  """

  def __init__(self, length: int = 0, *, drafts_first: bool = False):
    if length < 0:
      raise errors.UserError(f'length must be at least 0, got {length}')
    self._length = length
    self._drafts_first = drafts_first

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    lengths = np.minimum(view.limits, self._length)
    return policies.DraftPlan(lengths=lengths, is_first=self._drafts_first)
