"""Costs of drafts that the target makes itself over a part of each text.

A forward of such a draft is a plain step at a short context, so costs of the
target say all (MagicDec, arXiv 2408.11049).
"""

import dataclasses

import numpy as np

from swiftspec_jax.policies import cost_model


@dataclasses.dataclass(frozen=True)
class SelfDraftCosts:
  """Costs of a target, with its own forwards for drafts.

  Attributes:
    costs: costs of the target; what they say of drafts does not count.
    num_seen: tokens of a row that a draft sees.
  """

  costs: cost_model.CostModel
  num_seen: int

  drafts_by_model = False  # the target reads the texts

  def predict(
    self,
    num_rows: int,
    num_query_tokens: cost_model.Numbers,
    kv_tokens: float,
    num_draft_steps: cost_model.Numbers,
    **options: bool | np.ndarray,
  ) -> cost_model.StepSeconds:
    sizes = num_rows, num_query_tokens, kv_tokens, num_draft_steps
    found = self.costs.predict(*sizes, **options)
    # Rows of a batch differ; their mean is what is known here.
    seen = min(kv_tokens, num_rows * self.num_seen)
    forward = self.costs.predict(num_rows, num_rows, seen, 0).target
    return dataclasses.replace(
      found,
      draft=forward * np.asarray(num_draft_steps),
      draft_prefill=0.0,  # the cache is the target's
    )
