"""Costs of steps whose drafts cost nothing, such as those of lookups."""

import dataclasses

import numpy as np

from swiftspec_jax import cost_model


@dataclasses.dataclass(frozen=True)
class WithoutDraft:
  """Costs that were measured with a draft model, for steps without it.

  Attributes:
    costs: costs with the model.
  """

  costs: cost_model.CostModel

  def predict(
    self,
    num_rows: int,
    num_query_tokens: cost_model.Numbers,
    kv_tokens: float,
    num_draft_steps: cost_model.Numbers,
    *,
    finds_drafts: bool | np.ndarray = True,
    takes_in: bool | np.ndarray = False,
  ) -> cost_model.StepSeconds:
    del takes_in  # there is no model that could
    found = self.costs.predict(
      num_rows,
      num_query_tokens,
      kv_tokens,
      num_draft_steps,
      finds_drafts=finds_drafts,
    )
    return dataclasses.replace(found, draft=np.zeros_like(found.draft))
