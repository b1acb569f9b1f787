"""Costs that are linear in rows, query tokens and context.

This is the form that the authors of SmartSpec fitted (the `AutoTuner` of their
vLLM branch).
"""

import dataclasses

import numpy as np

from swiftspec_jax.policies import cost_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetCoefficients:
  """Seconds of the target's forward.

  Attributes:
    kv: seconds for each token in the cache.
    query_tokens: seconds for each token that is fed.
    rows: seconds for each row.
    speculative: seconds for a step that verifies drafts.
    fixed: seconds for each step.
  """

  kv: float
  query_tokens: float
  rows: float
  speculative: float
  fixed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCoefficients:
  """Seconds of drafting.

  Attributes:
    kv: seconds for each token in the cache.
    rows: seconds for each row.
    steps: seconds for each forward.
    fixed: seconds for each draft.
    target_share: share of the target's time, for drafters that are no model.
    draft_prefill: seconds for a chunk of late tokens.
  """

  kv: float = 0.0
  rows: float = 0.0
  steps: float = 0.0
  fixed: float = 0.0
  target_share: float = 0.0
  draft_prefill: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCosts:
  """Costs by coefficients.

  Attributes:
    target: costs of the target's forward.
    draft: costs of drafting, paid where there are draft forwards.
    overhead_share: share of the target's time, paid where there are draft
      forwards.
  """

  target: TargetCoefficients
  draft: DraftCoefficients
  overhead_share: float = 0.0

  @property
  def drafts_by_model(self) -> bool:
    """Whether a draft model has to read texts, and what that costs."""
    return self.draft.draft_prefill > 0

  def predict(
    self,
    num_rows: int,
    num_query_tokens: cost_model.Numbers,
    kv_tokens: float,
    num_draft_steps: cost_model.Numbers,
    *,
    finds_drafts: bool | np.ndarray = True,
    prefills_draft: bool | np.ndarray = False,
  ) -> cost_model.StepSeconds:
    target, draft = self.target, self.draft
    is_speculative = np.greater(num_draft_steps, 0)
    plain = target.rows * num_rows + target.kv * kv_tokens + target.fixed
    forward = (
      plain
      + target.query_tokens * num_query_tokens
      + target.speculative * (is_speculative & finds_drafts)
    )
    drafting = draft.kv * kv_tokens + draft.rows * num_rows + draft.fixed
    drafting = drafting + draft.steps * num_draft_steps
    if draft.target_share:
      drafting = drafting + draft.target_share * forward
    return cost_model.StepSeconds(
      draft=is_speculative * drafting,
      target=forward,
      overhead=self.overhead_share * is_speculative * forward,
      draft_prefill=draft.draft_prefill * np.asarray(prefills_draft),
    )

  def monotone(self) -> 'LinearCosts':
    """Returns the costs without signs that only correlations explain.

    A least-squares fit of features that go together can find that one more row
    makes a step faster. Here it costs at least nothing, and verification is
    never a gift.
    """
    target = dataclasses.replace(
      self.target,
      rows=max(self.target.rows, -self.target.query_tokens),
      speculative=max(self.target.speculative, 0.0),
    )
    return dataclasses.replace(self, target=target)
