"""The serving engine: continuous batching with speculation.

A step schedules, drafts, runs the target over the tokens of all rows, and
commits what stands. The scheduler says which rows there are, the policy how
far each of them is drafted for, and neither ever causes a compilation.

Legend: R rows of a step, B of them decode, U slots, K longest draft.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from swiftspec_jax import errors, policies, sharding, types
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.engine import engine
from swiftspec_jax.engine.handles import Handle
from swiftspec_jax.model import Model
from swiftspec_jax.policies.no_speculation import NoSpeculation
from swiftspec_jax.requests import Request
from swiftspec_jax.serving import jobs
from swiftspec_jax.serving.compilation import warm_up
from swiftspec_jax.serving.compilation.program_sizes import ProgramSizes
from swiftspec_jax.serving.compilation.programs import Programs
from swiftspec_jax.serving.drafters import make_drafter
from swiftspec_jax.serving.drafters.engine_drafter import (
  HostDrafter,
  SlotDrafts,
  SlotTexts,
)
from swiftspec_jax.serving.jobs import PagedJob
from swiftspec_jax.serving.scheduling.scheduler import Scheduler
from swiftspec_jax.serving.scheduling.step_plan import StepPlan
from swiftspec_jax.serving.target import paged_forward, step_input
from swiftspec_jax.serving.target.flat_batch import FlatSizes
from swiftspec_jax.serving.target.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PagedStepRecord(engine.StepRecord):
  """What a step did.

  Attributes:
    draft_plan: plan of the policy, late rows left out.
    takes_in: whether the draft model read a chunk of late tokens, see `Intake`.
    step: plan that was run; rows that decode lead.
    ended: i64[F] requests whose output is complete.
  """

  draft_plan: policies.DraftPlan
  takes_in: bool
  step: StepPlan
  ended: np.ndarray


class PageEngine(engine.Engine[PagedJob]):
  """Decodes over pages that requests share, with a policy of how much to draft.

  Attributes:
    policy: policy of how much to draft; may be replaced between steps.
    scheduler: queue, slots and pages, to look at.
    drafter: drafter, to look at.
    lookup: drafter of steps whose plan says `looks_up`, None without one.
  """

  limits_drafts = True

  def __init__(
    self,
    target: Model,
    draft: make_drafter.Draft = None,
    *,
    sizes: ProgramSizes,
    lookup: make_drafter.Lookup | None = None,
    policy: policies.Policy | None = None,
  ):
    """Allocates the caches; `warm_up` compiles, or `programs.start`.

    Args:
      target: model that decides every token of the output.
      draft: source of drafts. A draft model makes chains; in a `TreeDraft` or
        `LivingTrees` it makes trees. Others are a lookup, a `Datastore` and a
        `HostDrafter`. None is plain decoding.
      sizes: sizes that everything is compiled for.
      lookup: second source beside a draft model, where the policy prefers it.
      policy: policy that decides how much to speculate; by default nothing is.

    Raises:
      UserError: the sizes or the draft do not fit the target, or the target
        insists on kernels that cannot do its steps.
    """
    paged_forward.check_kernels(target, sizes)
    config = sizes.scheduler
    if config.max_context > target.config.max_context:
      raise errors.UserError(
        f'max_context={config.max_context} is more than the '
        f'{target.config.max_context} tokens that {target.name} takes'
      )
    super().__init__()
    self.max_rows = config.buckets.max_rows
    self.max_context = config.max_context
    self.max_draft_tokens = config.buckets.max_length
    self.policy = policy or NoSpeculation()
    self.scheduler = Scheduler(config)
    self._model = target
    self._sizes = sizes
    self._takes_trees = make_drafter.makes_trees(draft)
    model = make_drafter.model_of(draft, target)
    self._drafts_by_model = model is not None
    self._target = Target(
      target,
      sizes,
      takes_trees=self._takes_trees,
      feature_layers=model.config.feature_layers if model else (),
    )
    self.drafter = make_drafter.make(self._target, draft, sizes)
    self.lookup: HostDrafter | None = None
    if lookup is not None:
      self.lookup = make_drafter.make_lookup(lookup)
    num_slots = config.buckets.max_rows
    self.programs = Programs(sizes, self._target, self.drafter)
    self._texts = SlotTexts(
      token_ids=np.zeros((num_slots, config.max_context), np.int32),
      num_tenants=np.zeros(num_slots, np.int64),
      page_table=self.scheduler.page_table,
    )
    self._prompt_lengths = np.zeros(num_slots, np.int32)

  @property
  def num_running(self) -> int:
    return self.scheduler.num_running

  @property
  def cache_usage(self) -> float:
    return 1 - self.scheduler.num_free_pages / self.scheduler.config.num_pages

  @property
  def num_preemptions(self) -> int:
    return self.scheduler.num_preemptions

  def step(self) -> PagedStepRecord | None:
    """Runs a step; returns None if there is nothing to do."""
    self.programs.take(self._take_news_of_first(self.programs.num_ready))
    view = self.scheduler.begin_step()
    if view is None:
      return None
    start = time.perf_counter()
    self._seat()
    num_late_tokens = self.drafter.num_late_tokens(view, self._texts)
    view = dataclasses.replace(view, num_late_tokens=num_late_tokens)
    if np.isfinite(view.slo_tpots).any():
      jobs_of_view = [self._jobs[i] for i in view.request_ids.tolist()]
      seconds = [job.decode_seconds(start) for job in jobs_of_view]
      view = dataclasses.replace(view, decode_seconds=np.array(seconds))
    if not self.programs.can_draft(view):
      view = dataclasses.replace(view, limits=np.zeros_like(view.limits))
    view, plan = policies.ask(self.policy, view)
    drafts = self._draft(view, plan)
    if drafts.is_late is not None:
      plan = plan.without(drafts.is_late)
    lengths = self.policy.plan_verify(view, plan, drafts.drafts)
    lengths = np.minimum(lengths, drafts.drafts.lengths)
    step = self.scheduler.plan_step(view, lengths)
    output = self._dispatch(step, drafts)
    self.drafter.overlap()
    judged = None
    if self.lookup and hasattr(self.policy, 'judge') and not plan.looks_up:
      judged = self.lookup.draft(view, view.limits, self._texts)
    dispatched = time.perf_counter()
    output = sharding.everywhere((*output, drafts.report))
    packed, logprobs, report = jax.device_get(output)
    waited = time.perf_counter() - dispatched
    accepted, ended = self._commit(view, plan, step, drafts, packed, logprobs)
    end = time.perf_counter()
    self._observe(view, plan, step, drafts, packed, end - start)
    if judged is not None:
      self._judge(view, judged, packed)
    return PagedStepRecord(
      lengths=step.lengths[: step.num_decoding],
      num_accepted=accepted[: step.num_decoding],
      draft_plan=plan,
      looks_up=plan.looks_up,
      takes_in=drafts.takes_in,
      step=step,
      ended=ended,
      time=end,
      seconds=end - start,
      host_seconds=end - start - waited,
      **_verdicts(report),
    )

  def _draft(
    self, view: policies.StepView, plan: policies.DraftPlan
  ) -> SlotDrafts:
    """Drafts for the rows that the policy names."""
    if not plan.lengths.any():
      return self._target.without_drafts(plan.lengths)
    self.scheduler.reserve(view, plan.lengths)
    if plan.looks_up:
      drafts = self.lookup.draft(view, plan.lengths, self._texts)
      return dataclasses.replace(drafts, trees=self._target.chains)
    return self.drafter.draft(view, plan.lengths, self._texts)

  def _dispatch(
    self, step: StepPlan, drafts: SlotDrafts
  ) -> tuple[jax.Array, types.Logprobs | None]:
    """Enqueues the target's forward and the verdict."""
    packed = step_input.pack(
      self._sizes,
      self.programs.fit(step_input.flat_sizes(self._sizes, step)),
      step,
      self._texts.token_ids,
      self._prompt_lengths,
      self._texts.page_table,
    )
    return self._target.dispatch(
      packed,
      *self._target.put((drafts.token_ids, drafts.trees)),
      self._target.sampling.level(step.slots),
      self._texts.token_ids,
    )

  def _commit(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    step: StepPlan,
    drafts: SlotDrafts,
    packed: np.ndarray,
    logprobs: types.Logprobs | None,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Appends what stands to the outputs.

    Returns:
      i64[R] draft tokens that are part of the outputs, and the requests i64[F]
      that have ended.
    """
    num_accepted = np.zeros(len(step.slots), np.int64)
    is_ended = np.zeros(len(step.slots), bool)
    for i in np.flatnonzero(step.is_sampled).tolist():
      slot, job = int(step.slots[i]), self._jobs[int(step.request_ids[i])]
      known = job.num_known
      new = job.push_packed(
        packed[slot].tolist(),
        int(step.lengths[i]),
        jax.tree.map(lambda x, slot=slot: x[slot], logprobs),
        is_looked_up=plan.looks_up,
      )
      self._texts.token_ids[slot, known : known + len(new)] = new
      self.scheduler.add_page_keys(slot, job.new_page_keys())
      # A stop inside of accepted tokens cuts them.
      num_accepted[i] = len(new) - 1
      is_ended[i] = job.is_finished
    verified = packed[view.slots, 0].astype(np.int64)
    # The drafter has drafted nothing of what was looked up.
    drafted = drafts.drafts.lengths * (not plan.looks_up)
    self.drafter.commit(view, drafted, verified)
    ended = self.scheduler.commit(step, num_accepted, is_ended)
    for request_id in ended.tolist():
      del self._jobs[request_id]
      self._forget(request_id)
    return num_accepted, ended

  def _forget(self, request_id: int) -> None:
    """Tells all drafters that a request has ended."""
    self.drafter.forget(request_id)
    if self.lookup is not None:
      self.lookup.forget(request_id)

  def reset_drafters(self) -> None:
    """Forgets what ended requests have taught; only without requests."""
    self.drafter.reset()
    if self.lookup is not None:
      self.lookup.reset()

  def _observe(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    step: StepPlan,
    drafts: SlotDrafts,
    packed: np.ndarray,
    seconds: float,
  ) -> None:
    """Tells the policy."""
    packed = packed[view.slots].astype(np.int64)
    ranks = None
    if self._takes_trees:
      # Behind two counts, the tokens and the index of the root.
      path = packed[:, 2 + view.buckets.max_length + 2 :].T
      is_accepted = np.arange(len(path))[:, None] < packed[:, 0]
      ranks = np.where(is_accepted, path - 1, -1)
    self.policy.observe(
      policies.Outcome(
        view=view,
        plan=plan,
        drafts=drafts.drafts,
        lengths=step.lengths[: step.num_decoding],
        num_accepted=packed[:, 0],
        accepted_ranks=ranks,
        seconds=seconds,
        is_usable=self._target.sampling.is_usable(
          view.slots, for_model=self._drafts_by_model and not plan.looks_up
        ),
      )
    )

  def _judge(
    self, view: policies.StepView, drafts: SlotDrafts, packed: np.ndarray
  ) -> None:
    """Tells the policy what would have been accepted of lookups' drafts."""
    emitted = packed[view.slots, :1] + 1
    chains = drafts.token_ids[view.slots]
    places = np.arange(chains.shape[1])
    tokens = packed[view.slots, 2 : 2 + len(places)]
    lengths = np.minimum(drafts.drafts.lengths, emitted[:, 0])
    is_right = (chains == tokens) & (places < lengths[:, None])
    self.policy.judge(
      policies.Outcome(
        view=view,
        plan=policies.DraftPlan(lengths=view.limits, looks_up=True),
        drafts=drafts.drafts,
        lengths=lengths,
        num_accepted=is_right.cumprod(axis=1).sum(axis=1),
        seconds=float('nan'),
        is_usable=self._target.sampling.is_usable(view.slots, for_model=False),
      )
    )

  def _make_job(
    self, request: Request, handle: Handle, max_speculative_tokens: int | None
  ) -> PagedJob:
    config = self._sizes.scheduler
    jobs.check(request, self._model, config)
    return PagedJob(
      request,
      handle,
      self._model,
      config,
      max_speculative_tokens,
      chains_by_model=self._drafts_by_model,
    )

  def _queue(self, job: PagedJob) -> None:
    self.scheduler.submit(
      job.request_id,
      job.num_known,
      job.max_new_tokens,
      job.max_speculative_tokens,
      job.new_page_keys(),
      job.request.slo_tpot or np.inf,
    )

  def _drop(self, job: PagedJob) -> None:
    self.scheduler.cancel(job.request_id)
    self._forget(job.request_id)

  def _seat(self) -> None:
    """Writes down the texts of requests that have got a slot."""
    num_tenants = self.scheduler.num_tenants
    for slot in np.flatnonzero(self._texts.num_tenants != num_tenants).tolist():
      request_id = int(self.scheduler.request_ids[slot])
      job = self._jobs.get(request_id)
      if job is None:
        continue  # it has left again
      self._texts.token_ids[slot, : job.num_known] = job.known_tokens()
      self._prompt_lengths[slot] = len(job.request.token_ids)
      self._target.sampling.set(slot, job.request.sampling)
    self._texts.num_tenants[:] = num_tenants

  def trial(self, flat: FlatSizes, num_positions: int) -> StepPlan:
    """Runs an invented step of the target and waits, to measure the time.

    Only without requests.

    Args:
      flat: sizes of the step.
      num_positions: positions of its longest row, among those that take the
        context.

    Returns:
      The step.
    """
    step = warm_up.made_up_step(flat, num_positions)
    warm_up.run_step(self._sizes, self._target, flat, step)
    return step


def _verdicts(report: np.ndarray | None) -> dict[str, Any]:
  """Returns what `SlotDrafts.report` says, as fields of a record."""
  if report is None:
    return {}
  outcomes, num_forwards = report[report[:, 0] != types.NO_OUTCOME].T
  return {
    'outcomes': np.bincount(outcomes, minlength=tree_lib.NUM_OUTCOMES),
    'num_forwards': int(num_forwards.max(initial=0)),
  }
