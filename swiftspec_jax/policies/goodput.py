"""Goodput: as much speculation as makes the step emit most tokens a second.

SmartSpec (arXiv 2406.14066), for chains and trees, with a choice for every row.

Legend: B rows, K longest draft.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies import allocation, cost_model, search
from swiftspec_jax.policies.prediction.estimators import (
  ChainEstimator,
  Estimator,
)
from swiftspec_jax.policies.prediction.live_costs import LiveCosts

# Factor by which another longest draft has to be better than the one at hand,
# while the declared number of rows stays the same.
_HYSTERESIS = 1.02
# Steps that a plan holds for, as long as the rows stay the same: to plan takes
# some 0.3 ms.
_PLAN_EVERY = 8
# Steps between probes. A probe drafts for the rows of which nothing was
# verified since the probe before. It has room for about one token a row of the
# batch; those that wait longest come first.
_PROBE_EVERY = 128
_ROUNDING = 1e-6  # tokens that a sum of floats may miss
# What experiments may lose to plain steps: a share of all seconds, and the
# seconds of some steps to begin with. A probe can be dear: a draft model may
# have to read a long text first.
_LOST_SHARE = 0.01
_LOST_STEPS = 8
_PREFILL_DECAY = 0.9  # weight of a step in which a draft model read


class Goodput(policies.Policy):
  """Chooses the length of every draft by predicted goodput.

  From time to time rows of which nothing was verified get a short draft that
  is, whether or not others are drafted for: so it notices when their drafts
  become good. Where drafts cost nothing, but may not be found, all rows are
  drafted for: what to verify is chosen when it is known who has one. Where the
  step has no room for all, the goodput says whether drafts or prompts get it
  (`search`).
  """

  def __init__(
    self, costs: cost_model.CostModel, estimator: Estimator | None = None
  ):
    """Starts without knowledge.

    Args:
      costs: model of the seconds of a step; `LiveCosts` learn from outcomes.
      estimator: estimator of the acceptance; by default that of chains.
    """
    self._costs = costs
    self._live = costs if isinstance(costs, LiveCosts) else None
    self._estimator = estimator or ChainEstimator()
    self._last = (0, -1)  # declared rows, and index of the length
    # A plan, what it is for, and the step from which it no longer holds.
    self._held: tuple[policies.DraftPlan | None, bytes, int] = None, b'', 0
    self._last_probe = sys.maxsize  # step, at first the first one
    self._last_verified = np.zeros(0, np.int64)  # step, by slot
    self._has_free_drafts: bool | None = None  # not known yet
    # Outcomes that nothing has been learned from yet.
    self._news: list[Callable[[], None]] = []
    # Of all steps; lost by experiments, and by the last probe.
    self._seconds = self._lost_seconds = self._probe_loss = 0.0
    # Lost while a draft model read what it had missed, and the tokens of that.
    self._prefill_loss = self._prefilled = 0.0

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    if view.num_prefill_tokens:
      # The score has the price of what drafts take from prompts.
      plan = self._plan(view.with_drafts_first())
      return dataclasses.replace(plan, is_first=True)
    held, rows, end = self._held
    its_rows = view.request_ids.tobytes()
    if held is not None and view.step < end and rows == its_rows:
      return held
    plan = self._plan(view)
    if not plan.is_experiment:
      end = view.step + _PLAN_EVERY
      if not self._estimator.is_told:
        end = min(end, self._last_probe + _PROBE_EVERY)
      self._held = plan, its_rows, end
    return plan

  def plan_verify(self, view, plan, drafts) -> np.ndarray:
    chosen = self._chosen(view, plan, drafts)
    if plan.is_probe is not None:
      probes = np.minimum(drafts.lengths, _probe_length(view)) * plan.is_probe
      chosen = np.maximum(chosen, probes)
    return chosen

  def observe(self, outcome: policies.Outcome) -> None:
    self._take(self._learn, outcome)

  def observe_other(self, outcome: policies.Outcome) -> None:
    """Takes a step whose drafts were not those that this is about."""
    self._take(self._learn_from_other, outcome)

  def _take(
    self, learn: Callable[[policies.Outcome], None], outcome: policies.Outcome
  ) -> None:
    """Keeps an outcome for the next plan: in one go it takes less time."""
    self._news.append(functools.partial(learn, outcome))
    if self._estimator.is_told and outcome.looked_up is not None:
      self._held = None, b'', 0  # it is known again what is best
    if len(self._news) >= _PLAN_EVERY:
      self._catch_up()

  def _catch_up(self) -> None:
    news, self._news = self._news, []
    for learn in news:
      learn()

  def _learn(self, outcome: policies.Outcome) -> None:
    self._estimator.observe(outcome)
    if self._live is not None:
      self._live.observe(outcome)
    view = outcome.view
    self._count_seconds(outcome)
    self._make_room(view)
    self._last_verified[view.slots[outcome.lengths > 0]] = view.step
    if outcome.plan.is_probe is not None:
      # Rows that had no draft, as it was late or not found, stay due.
      is_due = outcome.plan.is_probe & (outcome.lengths == 0)
      if is_due.any():
        self._last_probe = view.step - _PROBE_EVERY
        self._last_verified[view.slots[is_due]] = self._last_probe

  def _learn_from_other(self, outcome: policies.Outcome) -> None:
    self._seconds += outcome.seconds
    self._estimator.observe_other(outcome)
    if self._live is not None:
      self._live.observe(outcome)

  def _count_seconds(self, outcome: policies.Outcome) -> None:
    """Adds up the seconds of steps, and those that experiments have lost."""
    self._seconds += outcome.seconds
    view, plan = outcome.view, outcome.plan
    if not outcome.prefills_draft and (
      not plan.is_experiment or outcome.num_fed == 0
    ):
      return
    factor = 1 + outcome.num_accepted.sum() / max(view.num_rows, 1)
    loss = outcome.seconds - factor * self._plain_seconds(view)
    loss = max(loss, 0.0)
    if plan.is_experiment:
      self._lost_seconds += loss
    if outcome.prefills_draft:
      chunk = min(view.num_unread_tokens, view.buckets.max_query_tokens)
      self._prefill_loss = _PREFILL_DECAY * self._prefill_loss + loss
      self._prefilled = _PREFILL_DECAY * self._prefilled + chunk
    elif plan.is_probe is not None:
      self._probe_loss = loss

  def prefill_loss(self, view: policies.StepView) -> float:
    """Returns the seconds lost while a draft model reads what it has missed."""
    return view.num_unread_tokens * self._prefill_loss / max(self._prefilled, 1)

  def _can_lose(self, loss: float, view: policies.StepView) -> bool:
    room = _LOST_STEPS * self._plain_seconds(view) + _LOST_SHARE * self._seconds
    return self._lost_seconds + loss <= room

  def _plain_seconds(self, view: policies.StepView) -> float:
    """Returns the predicted seconds of the step without drafts."""
    buckets, num_rows = view.buckets, max(view.num_rows, 1)
    fed = min(num_rows + view.num_prefill_tokens, buckets.max_query_tokens)
    parts = self._costs.predict(
      buckets.pad_rows(num_rows),
      buckets.computed_tokens(num_rows, fed),
      int(view.kv_lengths.sum()) + view.prefill_kv_tokens,
      0,
    )
    return float(parts.total)

  def _plan(self, view: policies.StepView) -> policies.DraftPlan:
    self._catch_up()
    limits = view.fitting(view.limits)
    gains = self._gains(view, limits)
    coverage = self._estimator.coverage(view)
    lengths = np.array(view.buckets.lengths)
    scores = search.score(
      view,
      gains,
      self._costs,
      lengths=lengths,
      draft_steps=np.array(view.buckets.draft_steps),
      coverage=coverage,
    )
    due = None
    # Most steps try nothing, and need no price.
    if self._live and self._live.is_due(view) and self._can_lose(0.0, view):
      due = self._live.due(view)
    if due and scores.expected_tokens[due] < _HYSTERESIS * view.num_rows:
      due = None  # it would not pay if it took no longer
    choice = self._choose(view, scores.goodput) if due is None else due
    num_tokens = int(scores.num_tokens[choice] + _ROUNDING)
    longest = lengths[choice]
    if coverage < 1 and self._knows_free_drafts(view):
      longest, num_tokens = lengths[-1], view.max_draft_tokens
    planned = allocation.allocate(gains[:longest], num_tokens)
    probes = None
    if not self._estimator.is_told:
      probes = self._probes(view, limits)
    if probes is not None:
      room = max(view.max_draft_tokens - int(probes.sum()), 0)
      planned = allocation.allocate(gains[:longest], min(num_tokens, room))
      return policies.DraftPlan(
        lengths=np.maximum(planned, probes), is_probe=probes > 0
      )
    if due is not None:
      return policies.DraftPlan(lengths=planned)
    return policies.DraftPlan(
      lengths=planned,
      expected_tokens=float(scores.expected_tokens[choice]),
      expected_seconds=float(scores.expected_seconds[choice]),
    )

  def _chosen(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    drafts: policies.Drafts,
  ) -> np.ndarray:
    """Returns the best part of the drafts, i64[B]."""
    has_confidences = (
      drafts.confidences is not None or drafts.node_confidences is not None
    )
    is_as_planned = (
      not has_confidences
      and np.array_equal(drafts.lengths, plan.lengths)
      and not self._knows_free_drafts(view)
    )
    if is_as_planned or not drafts.lengths.any():
      return drafts.lengths
    self._catch_up()
    gains = self._estimator.gains_of(drafts)
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

  def _knows_free_drafts(self, view: policies.StepView) -> bool:
    """Returns whether drafts cost nothing, and the host knows who has one."""
    if view.finds_drafts_late:
      return False
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
    if is_comparable and goodput[best] < goodput[last] * _HYSTERESIS:
      best = last
    self._last = rows, best
    return best

  def _probes(
    self, view: policies.StepView, limits: np.ndarray
  ) -> np.ndarray | None:
    """Returns the least lengths i64[B] of a step that probes."""
    self._last_probe = min(self._last_probe, view.step)
    elapsed = view.step - self._last_probe
    is_time = elapsed >= _PROBE_EVERY and limits.any()
    loss = self.prefill_loss(view) or self._probe_loss
    if not is_time or not self._can_lose(loss, view):
      return None
    self._make_room(view)
    last = self._last_verified[view.slots]
    rows = np.flatnonzero((last <= self._last_probe) & (limits > 0))
    self._last_probe = view.step
    length = _probe_length(view)
    count = -(-min(view.num_rows, view.max_draft_tokens) // length)
    rows = rows[last[rows].argsort(kind='stable')[:count]]
    if not len(rows):
      return None
    # Also where it finds no draft, it is the turn of others.
    self._last_verified[view.slots[rows]] = view.step
    probes = np.zeros(view.num_rows, np.int64)
    probes[rows] = np.minimum(length, limits[rows])
    return probes

  def _make_room(self, view: policies.StepView) -> None:
    if len(self._last_verified) != view.buckets.max_rows:
      self._last_verified = np.full(view.buckets.max_rows, -1)


def _probe_length(view: policies.StepView) -> int:
  """Returns the shortest declared draft."""
  return view.buckets.lengths[1]
