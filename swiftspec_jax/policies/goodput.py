"""Goodput: as much speculation as makes the step emit most tokens a second.

SmartSpec (arXiv 2406.14066), for chains and trees, with a choice for every row.

Legend: B rows, K longest draft.
"""

import numpy as np

from swiftspec_jax import cost_model, policies
from swiftspec_jax.policies import allocation, search
from swiftspec_jax.policies.estimators import ChainEstimator, Estimator

_HYSTERESIS = 1.02  # gain that is worth another length
_PROBE_EVERY = 128  # steps without drafts
_PROBE_SHARE = 16  # one of so many rows is probed
_ROUNDING = 1e-6  # tokens that a sum of floats may miss


class Goodput:
  """Chooses the length of every draft by predicted goodput.

  While it does not speculate, a few rows are drafted for from time to time and
  their drafts are verified, so that it notices when drafts become good. Where
  drafts cost nothing, but may not be found, all rows are drafted for: what to
  verify is chosen when it is known who has one.
  """

  def __init__(
    self,
    costs: cost_model.CostModel,
    estimator: Estimator | None = None,
    *,
    hysteresis: float = _HYSTERESIS,
    probe_every: int = _PROBE_EVERY,
  ):
    """Starts without knowledge.

    Args:
      costs: of a step.
      estimator: predicts the acceptance; by default that of chains.
      hysteresis: factor by which another longest draft has to be better than
        the one at hand, while the declared number of rows stays the same.
      probe_every: steps without drafts before some rows are probed.
    """
    self._costs = costs
    self._estimator = estimator or ChainEstimator()
    self._hysteresis = hysteresis
    self._probe_every = probe_every
    self._last = (0, -1)  # declared rows, and index of the length
    self._last_draft = 0  # step
    self._has_free_drafts: bool | None = None  # not known yet

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    gains = self._gains(view, view.limits)
    coverage = self._estimator.coverage
    lengths = _feasible(view)
    scores = search.score(
      view,
      gains,
      self._costs,
      lengths=lengths,
      draft_steps=view.buckets.draft_step_array[: len(lengths)],
      coverage=coverage,
    )
    choice = self._choose(view, scores.goodput)
    num_tokens = int(scores.num_tokens[choice] + _ROUNDING)
    longest = lengths[choice]
    if coverage < 1 and self._is_free(view):
      longest, num_tokens = lengths[-1], view.max_draft_tokens
    planned = allocation.allocate(gains[:longest], num_tokens)
    if planned.any():
      self._last_draft = view.step
    elif len(lengths) > 1 and self._is_due(view):
      return self._probe(view, int(lengths[1]))
    return policies.DraftPlan(
      lengths=planned,
      expected_tokens=float(scores.expected_tokens[choice]),
      expected_seconds=float(scores.expected_seconds[choice]),
    )

  def plan_verify(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    drafts: policies.Drafts,
  ) -> np.ndarray:
    gains = self._estimator.gains_of(drafts)
    is_as_planned = (
      gains is None
      and np.array_equal(drafts.lengths, plan.lengths)
      and not self._is_free(view)
    )
    if plan.is_probe or is_as_planned or not drafts.lengths.any():
      return drafts.lengths
    longest = int(drafts.lengths.max())
    if gains is None:
      gains = self._gains(view, drafts.lengths)
    else:
      gains *= np.arange(len(gains))[:, None] < drafts.lengths
    # What has been drafted is paid for, however little is verified.
    scores = search.score(
      view,
      gains,
      self._costs,
      lengths=np.array([0, longest]),
      draft_steps=np.repeat(view.buckets.steps_of(longest), 2),
    )
    best = scores.goodput.argmax()
    return allocation.allocate(
      gains[:longest], int(scores.num_tokens[best] + _ROUNDING)
    )

  def observe(self, outcome: policies.Outcome) -> None:
    self._estimator.observe(outcome)

  def _is_free(self, view: policies.StepView) -> bool:
    """Returns whether drafting takes no time, as with lookups."""
    if self._has_free_drafts is None:
      buckets = view.buckets
      steps = buckets.draft_steps[-1]
      size = buckets.query_tokens[-1]
      draft = self._costs.predict(buckets.rows[0], size, 0, steps).draft
      self._has_free_drafts = not np.any(draft)
    return self._has_free_drafts

  def _gains(self, view: policies.StepView, limits: np.ndarray) -> np.ndarray:
    gains = self._estimator.gains(view)
    if limits.min(initial=len(gains)) < len(gains):
      gains *= np.arange(len(gains))[:, None] < limits
    return gains

  def _choose(self, view: policies.StepView, goodput: np.ndarray) -> int:
    """Returns the index of the best length, or of the last one."""
    best = int(goodput.argmax())
    rows = view.buckets.pad_rows(max(view.num_rows, 1))
    last_rows, last = self._last
    is_comparable = rows == last_rows and last < len(goodput)
    if is_comparable and goodput[best] < goodput[last] * self._hysteresis:
      best = last
    self._last = rows, best
    return best

  def _is_due(self, view: policies.StepView) -> bool:
    elapsed = view.step - self._last_draft
    return elapsed >= self._probe_every and bool(view.limits.any())

  def _probe(self, view: policies.StepView, length: int) -> policies.DraftPlan:
    """Drafts for some rows, each time for others."""
    self._last_draft = view.step
    rows = np.flatnonzero(view.limits)
    count = -(-len(rows) // _PROBE_SHARE)
    start = view.step // self._probe_every * count
    chosen = rows[(start + np.arange(count)) % len(rows)]
    planned = np.zeros(view.num_rows, np.int64)
    planned[chosen] = np.minimum(length, view.limits[chosen])
    return policies.DraftPlan(lengths=planned, is_probe=True)


def _feasible(view: policies.StepView) -> np.ndarray:
  """Returns the declared lengths i64[C] that fit into the memory."""
  lengths = view.buckets.length_array
  while not view.fits(np.minimum(view.limits, lengths[-1])):
    lengths = lengths[:-1]
  return lengths
