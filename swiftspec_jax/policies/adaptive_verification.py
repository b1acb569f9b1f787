"""vLLM's adaptive verification, to compare with: draft all, verify the best.

All rows draft the same number of tokens. How many of them are verified is
chosen by what they are expected to add, over what the step costs. It follows
vllm/v1/worker/gpu/spec_decode/adaptive_verification.py and
acceptance_estimator.py of vLLM (pull requests 47808 and 52228, version 0.32),
with the constants there.

Legend: B rows, K longest draft.
"""

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies import allocation, cost_model

_REFIT_EVERY = 100  # steps
_NUM_WARM_UP_REFITS = 3
_FIRST_INTERCEPT = 1.5
_DAMPING = 50.0  # observations for which half a Newton step is taken
_RIDGE = 1e-3
_MAX_FEATURE = 40.0


class LogisticAcceptance:
  """Acceptance of a position, by logistic regression on the draft's confidence.

  One slope for all positions, an intercept for each. Every 100 steps they take
  one damped Newton step from what these steps said.

  Attributes:
    slope: weight of the log odds that the draft gives its token.
    intercepts: f64[K].
    num_refits: so far.
  """

  def __init__(self, num_positions: int):
    self.slope = 0.0
    self.intercepts = np.full(num_positions, _FIRST_INTERCEPT)
    self.num_refits = 0
    self._clear()

  def __call__(self, features: np.ndarray) -> np.ndarray:
    """Returns the probability of acceptance of tokens that are reached.

    Args:
      features: f64[K, B], of `features_of`.
    """
    logits = self.slope * features + self.intercepts[:, None]
    return 1 / (1 + np.exp(-logits))

  def observe(
    self, features: np.ndarray, lengths: np.ndarray, num_accepted: np.ndarray
  ) -> None:
    """Takes a step: what was verified and accepted, both i64[B]."""
    places = np.arange(len(features))[:, None]
    is_judged = (places <= num_accepted) & (places < lengths)
    expected = self(features)
    weights = expected * (1 - expected) * is_judged
    residuals = ((places < num_accepted) - expected) * is_judged
    self._counts += is_judged.sum(axis=1)
    self._information += weights.sum(axis=1)
    self._coupling += (weights * features).sum(axis=1)
    self._score += residuals.sum(axis=1)
    self._slope_information += (weights * features**2).sum()
    self._slope_score += (residuals * features).sum()
    self._num_steps += 1
    if self._num_steps == _REFIT_EVERY:
      self._refit()

  def _refit(self) -> None:
    information = self._information + _RIDGE
    share = self._coupling / information
    # The intercepts are eliminated from the equations of the slope.
    step = self._slope_score - share @ self._score
    step /= self._slope_information + _RIDGE - share @ self._coupling
    step *= _damped(self._counts.sum())
    if self.slope + step < 0:
      step = 0.0
    self.slope += step
    steps = (self._score - self._coupling * step) / information
    self.intercepts = self.intercepts + steps * _damped(self._counts)
    self.num_refits += 1
    self._clear()

  def _clear(self) -> None:
    self._num_steps = 0
    self._counts = np.zeros(len(self.intercepts))
    self._information = np.zeros(len(self.intercepts))
    self._coupling = np.zeros(len(self.intercepts))
    self._score = np.zeros(len(self.intercepts))
    self._slope_information = self._slope_score = 0.0


def _damped(num_observations):
  return num_observations / (num_observations + _DAMPING)


def features_of(drafts: policies.Drafts, num_positions: int) -> np.ndarray:
  """Returns the log odds of draft tokens f64[K, B].

  They are 0 where there is no token, or the drafter does not tell: what is left
  then is an acceptance for each position.
  """
  if drafts.confidences is None:
    return np.zeros((num_positions, len(drafts.lengths)))
  with np.errstate(divide='ignore'):
    confidences = np.nan_to_num(drafts.confidences)
    odds = np.log(confidences) - np.log1p(-confidences)
  is_token = np.arange(num_positions)[:, None] < drafts.lengths
  return np.where(is_token, np.clip(odds, -_MAX_FEATURE, _MAX_FEATURE), 0.0)


class AdaptiveVerification(policies.Policy):
  """Drafts a fixed length and verifies the tokens most likely to be accepted.

  The number of tokens comes from what the drafts before were expected to bring,
  1 for a request without any, as vLLM's copies to the host are late by a step.
  Which tokens they are comes from the drafts at hand. For the first 300 steps
  all are verified. vLLM profiles steps at one context length, of 8192 tokens
  unless it is told another; here their cost is that of the contexts at hand.
  Drafts come before prompts.
  """

  def __init__(self, costs: cost_model.CostModel, length: int):
    """Starts without knowledge.

    Args:
      costs: seconds of a step.
      length: draft tokens of every row.
    """
    self._costs = costs
    self._length = length
    self._acceptance = LogisticAcceptance(0)
    # Of the requests in the slots: the acceptance of their last draft.
    self._request_ids = np.zeros(0, np.int64)
    self._last = np.zeros((0, 0))

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    lengths = np.minimum(view.limits, self._length)
    return policies.DraftPlan(lengths=lengths, is_first=True)

  def plan_verify(self, view, plan, drafts) -> np.ndarray:
    self._make_room(view)
    num_positions = view.buckets.max_length
    acceptance = self._acceptance(features_of(drafts, num_positions))
    last = self._last_of(view)
    self._last[:, view.slots] = acceptance
    self._request_ids[view.slots] = view.request_ids
    is_warming_up = self._acceptance.num_refits < _NUM_WARM_UP_REFITS
    if is_warming_up or not drafts.lengths.any():
      return drafts.lengths
    is_token = np.arange(num_positions)[:, None] < drafts.lengths
    gains = np.sort(last.cumprod(axis=0)[is_token])[::-1]
    budget = self._budget(view, plan, gains)
    return allocation.allocate(acceptance.cumprod(axis=0) * is_token, budget)

  def observe(self, outcome: policies.Outcome) -> None:
    self._make_room(outcome.view)
    if outcome.view.num_rows:
      features = features_of(outcome.drafts, outcome.view.buckets.max_length)
      self._acceptance.observe(features, outcome.lengths, outcome.num_accepted)

  def _budget(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    gains: np.ndarray,
  ) -> int:
    """Returns the best number of tokens, given all gains, best first."""
    buckets = view.buckets
    room = buckets.max_query_tokens - view.num_rows - len(gains)
    num_fed = view.num_rows + min(view.num_prefill_tokens, room)
    sizes = num_fed + np.arange(len(gains) + 1)
    seconds = self._costs.predict(
      buckets.pad_rows(view.num_rows),
      buckets.computed_tokens(view.num_rows, sizes),
      int(view.kv_lengths.sum()) + view.prefill_kv_tokens,
      buckets.steps_of(int(plan.lengths.max())),
    ).total
    expected = view.num_rows + np.concatenate([[0.0], gains.cumsum()])
    return int(np.argmax(expected / seconds))

  def _last_of(self, view: policies.StepView) -> np.ndarray:
    """Returns the acceptance f64[K, B] that the last drafts were given."""
    is_known = self._request_ids[view.slots] == view.request_ids
    return np.where(is_known, self._last[:, view.slots], 1.0)

  def _make_room(self, view: policies.StepView) -> None:
    shape = view.buckets.max_length, view.buckets.max_rows
    if self._last.shape != shape:
      self._acceptance = LogisticAcceptance(shape[0])
      self._request_ids = np.full(shape[1], -1)
      self._last = np.ones(shape)
