"""The loop of an engine, in virtual time."""

import dataclasses
from typing import Protocol

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.models.draft_prefill import DraftPrefill
from swiftspec_jax.policies import cost_model
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.scheduler import Scheduler
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.simulator import load_metrics
from swiftspec_jax.simulator.arrivals import Arrivals


class Acceptance(Protocol):
  """Stands for the two models."""

  def draft(
    self, view: policies.StepView, lengths: np.ndarray
  ) -> policies.Drafts:
    """Returns the drafts of rows, of at most i64[B] tokens."""

  def verify(
    self, view: policies.StepView, lengths: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns numbers of accepted tokens, and their places in a tree."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
  """What was simulated.

  Attributes:
    recorder: record of each request.
    num_preemptions: number of preemptions.
  """

  recorder: load_metrics.LoadRecorder
  num_preemptions: int


def simulate(
  arrivals: Arrivals,
  acceptance: Acceptance,
  policy: policies.Policy,
  config: SchedulerConfig,
  costs: cost_model.CostModel,
  *,
  drafts_by_model: bool = False,
) -> Simulation:
  """Serves all requests.

  A step takes what `costs` say of its declared sizes; requests that arrive
  meanwhile wait for its end.

  Args:
    arrivals: arrivals of the requests.
    acceptance: distribution that accepts drafts.
    policy: a new one.
    config: configuration of the engine.
    costs: costs of its steps.
    drafts_by_model: whether a draft model has to read the texts, see
      `drafters.models.draft_prefill`.

  Raises:
    UserError: a request does not fit into the engine.
  """
  scheduler = Scheduler(config)
  draft_prefill = DraftPrefill(config.buckets) if drafts_by_model else None
  recorder = load_metrics.LoadRecorder(arrivals, config.buckets.max_length)
  prompt_tokens = arrivals.prompt_tokens.tolist()
  output_tokens = arrivals.output_tokens.tolist()
  times = arrivals.times.tolist()
  time, i = 0.0, 0  # and the next request
  while True:
    while i < len(times) and times[i] <= time:
      scheduler.submit(i, prompt_tokens[i], output_tokens[i])
      i += 1
    view = scheduler.begin_step()
    if view is None:
      if i == len(times):
        break
      time = times[i]
      continue
    time += _run_step(
      scheduler,
      draft_prefill,
      view,
      acceptance,
      policy,
      costs,
      recorder,
      time,
    )
  return Simulation(
    recorder=recorder, num_preemptions=scheduler.num_preemptions
  )


def step_seconds(
  costs: cost_model.CostModel,
  buckets: StepBuckets,
  plan: policies.DraftPlan,
  step: StepPlan,
  *,
  prefills_draft: bool = False,
) -> float:
  """Returns how long a whole step will take.

  Args:
    costs: costs of the engine.
    buckets: declared sizes of the step.
    plan: plan of the policy; drafting is paid for even if it finds
      nothing.
    step: step that is run.
    prefills_draft: whether a draft model reads a chunk of late tokens.
  """
  longest = int(plan.lengths.max(initial=0))
  predicted = costs.predict(
    step.padded_rows,
    step.num_computed_tokens,
    step.kv_tokens,
    buckets.steps_of(longest),
    finds_drafts=bool(step.lengths.any()),
    prefills_draft=prefills_draft,
  )
  return float(predicted.total)


def _run_step(
  scheduler: Scheduler,
  draft_prefill: DraftPrefill | None,
  view: policies.StepView,
  acceptance: Acceptance,
  policy: policies.Policy,
  costs: cost_model.CostModel,
  recorder: load_metrics.LoadRecorder,
  time: float,
) -> float:
  """Runs a step from `time` on; returns its seconds."""
  if draft_prefill is not None:
    count = draft_prefill.num_unread_tokens(view, scheduler.slot_generations)
    view = dataclasses.replace(view, num_unread_tokens=count)
  view, plan = policies.ask(policy, view)
  prefills_draft = False
  if draft_prefill is not None:
    taken = draft_prefill.plan(view, plan.lengths)
    draft_prefill.take(view, taken)
    plan = plan.without(~taken.is_ready)
    prefills_draft = bool(taken.chunks.any())
  drafts = acceptance.draft(view, plan.lengths)
  lengths = policy.plan_verify(view, plan, drafts)
  step = scheduler.plan_step(view, lengths)
  seconds = step_seconds(
    costs, view.buckets, plan, step, prefills_draft=prefills_draft
  )
  verified = step.lengths[: step.num_decoding]
  accepted, ranks = acceptance.verify(view, verified)
  if draft_prefill is not None and ranks is None:
    # The last token of a chain was not fed.
    draft_prefill.keep(
      view, np.minimum(accepted, np.maximum(drafts.lengths - 1, 0))
    )
  num_accepted = np.zeros(len(step.slots), np.int64)
  num_accepted[: step.num_decoding] = accepted
  recorder.note_step(plan, step, accepted, time + seconds, seconds)
  recorder.note_finished(scheduler.commit(step, num_accepted))
  policy.observe(
    policies.Outcome(
      view=view,
      plan=plan,
      drafts=drafts,
      lengths=verified,
      num_accepted=accepted,
      seconds=seconds,
      accepted_ranks=ranks,
    )
  )
  return seconds
