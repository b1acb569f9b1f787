"""The serving engine: continuous batching with speculation.

A step schedules, drafts, runs the target over the tokens of all rows, and
commits what stands. The scheduler says which rows there are, the policy how
far each of them is drafted for, and neither ever causes a compilation.

Legend: R rows of a step, B of them decode, U slots, K longest draft.
"""

import collections
import dataclasses
import itertools
import threading
import time

import jax
import numpy as np

from swiftspec_jax import errors, policies, types
from swiftspec_jax.model import Model
from swiftspec_jax.policies.no_speculation import NoSpeculation
from swiftspec_jax.requests import Request
from swiftspec_jax.serving import (
  jobs,
  make_drafter,
  paged_forward,
  step_input,
  warm_up,
)
from swiftspec_jax.serving.draft_tree import TreeDraft
from swiftspec_jax.serving.drafters import SlotDrafts, SlotTexts
from swiftspec_jax.serving.flat_batch import FlatSizes
from swiftspec_jax.serving.handles import Handle
from swiftspec_jax.serving.jobs import Job
from swiftspec_jax.serving.program_sizes import ProgramSizes
from swiftspec_jax.serving.scheduler import Scheduler
from swiftspec_jax.serving.step_plan import StepPlan
from swiftspec_jax.serving.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
  """What a step did.

  Attributes:
    draft_plan: what the policy asked for, late rows left out.
    takes_in: the draft model took in a chunk of late tokens, as `Intake` says.
    step: what was run.
    num_accepted: i64[R] draft tokens that are part of the outputs.
    ended: i64[F] requests whose output is complete.
    time: at its end, in seconds of `time.perf_counter`.
    seconds: that it took.
  """

  draft_plan: policies.DraftPlan
  takes_in: bool
  step: StepPlan
  num_accepted: np.ndarray
  ended: np.ndarray
  time: float
  seconds: float


class Engine:
  """Serves requests that come at any time.

  `submit` and `Handle.cancel` may be called from any thread, `step` from one.

  Attributes:
    policy: may be replaced between steps.
    scheduler: to look at.
    drafter: likewise.
    is_running: a thread runs the steps.
    error: with which a step has failed; the engine is of no use any more.
  """

  def __init__(
    self,
    target: Model,
    draft: make_drafter.Draft = None,
    *,
    sizes: ProgramSizes,
    policy: policies.Policy | None = None,
  ):
    """Allocates the caches; `warm_up` compiles.

    Args:
      target: defines the output.
      draft: a draft model, for chains or in a `TreeDraft`, a lookup, or None
        for plain decoding.
      sizes: that everything is compiled for.
      policy: how much to speculate; not at all by default.

    Raises:
      UserError: the sizes or the draft do not fit the target, or it insists
        on kernels.
    """
    paged_forward.check_kernels(target)
    config = sizes.scheduler
    if config.max_context > target.config.max_context:
      raise errors.UserError(
        f'max_context={config.max_context} is more than the '
        f'{target.config.max_context} tokens that {target.name} takes'
      )
    self.policy = policy or NoSpeculation()
    self.scheduler = Scheduler(config)
    self.is_running = False
    self.error: BaseException | None = None
    self._model = target
    self._sizes = sizes
    self._takes_trees = isinstance(draft, TreeDraft)
    model = make_drafter.model_of(draft, target)
    self._drafts_by_model = model is not None
    self._target = Target(
      target,
      sizes,
      takes_trees=self._takes_trees,
      feature_layers=model.config.feature_layers if model else (),
    )
    self.drafter = make_drafter.make(self._target, draft, sizes)
    num_slots = config.buckets.max_rows
    self._texts = SlotTexts(
      token_ids=np.zeros((num_slots, config.max_context), np.int32),
      num_tenants=np.zeros(num_slots, np.int64),
      page_table=self.scheduler.page_table,
    )
    self._prompt_lengths = np.zeros(num_slots, np.int32)
    self._jobs: dict[int, Job] = {}
    self._request_ids = itertools.count()
    self._submitted: collections.deque[Job] = collections.deque()
    self._cancelled: collections.deque[int] = collections.deque()
    self._has_work = threading.Event()

  @property
  def num_requests(self) -> int:
    """Requests that have not ended."""
    return len(self._jobs) + len(self._submitted)

  def submit(
    self, request: Request, *, max_speculative_tokens: int | None = None
  ) -> Handle:
    """Takes a request.

    Args:
      request: what to decode.
      max_speculative_tokens: longest draft for it; 0 for none, None leaves it
        to the policy.

    Raises:
      UserError: the prompt is empty or too long, or a token is outside the
        vocabulary.
    """
    jobs.check(request, self._model, self._sizes.scheduler)
    handle = Handle(next(self._request_ids), self._wait, self._cancel)
    config = self._sizes.scheduler
    job = Job(request, handle, self._model, config, max_speculative_tokens)
    self._submitted.append(job)
    self._has_work.set()
    if self.error is not None:
      handle.fail(self.error)
    return handle

  def step(self) -> StepRecord | None:
    """Runs a step; returns None if there is nothing to do."""
    self._take_news()
    view = self.scheduler.begin_step()
    if view is None:
      return None
    start = time.perf_counter()
    self._seat()
    num_late_tokens = self.drafter.num_late_tokens(view, self._texts)
    view = dataclasses.replace(view, num_late_tokens=num_late_tokens)
    view, plan = policies.ask(self.policy, view)
    drafts = self._draft(view, plan)
    if drafts.is_late is not None:
      plan = plan.without(drafts.is_late)
    lengths = self.policy.plan_verify(view, plan, drafts.drafts)
    lengths = np.minimum(lengths, drafts.drafts.lengths)
    step = self.scheduler.plan_step(view, lengths)
    packed, logprobs = jax.device_get(self._dispatch(step, drafts))
    accepted, ended = self._commit(view, step, drafts, packed, logprobs)
    end = time.perf_counter()
    self._observe(view, plan, step, drafts, packed, end - start)
    return StepRecord(
      draft_plan=plan,
      takes_in=drafts.takes_in,
      step=step,
      num_accepted=accepted,
      ended=ended,
      time=end,
      seconds=end - start,
    )

  def _draft(
    self, view: policies.StepView, plan: policies.DraftPlan
  ) -> SlotDrafts:
    """Drafts for the rows that the policy names."""
    if not plan.lengths.any():
      return self._target.without_drafts(plan.lengths)
    self.scheduler.reserve(view, plan.lengths)
    return self.drafter.draft(view, plan.lengths, self._texts)

  def _dispatch(
    self, step: StepPlan, drafts: SlotDrafts
  ) -> tuple[jax.Array, types.Logprobs | None]:
    """Enqueues the target's forward and the verdict."""
    packed = step_input.pack(
      self._sizes,
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
      new = job.push(
        packed[slot].tolist(),
        int(step.lengths[i]),
        jax.tree.map(lambda x, slot=slot: x[slot], logprobs),
      )
      self._texts.token_ids[slot, known : known + len(new)] = new
      self.scheduler.add_page_keys(slot, job.new_page_keys())
      # A stop inside of accepted tokens cuts them.
      num_accepted[i] = len(new) - 1
      is_ended[i] = job.is_finished
    verified = packed[view.slots, 0].astype(np.int64)
    self.drafter.commit(view, drafts.drafts.lengths, verified)
    ended = self.scheduler.commit(step, num_accepted, is_ended)
    for request_id in ended.tolist():
      self._forget(request_id)
    return num_accepted, ended

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
          view.slots, for_model=self._drafts_by_model
        ),
      )
    )

  def _take_news(self) -> None:
    """Hands the scheduler what came since the last step."""
    self._has_work.clear()
    while self._submitted:
      job = self._submitted.popleft()
      self._jobs[job.request_id] = job
      self.scheduler.submit(
        job.request_id,
        job.num_known,
        job.max_new_tokens,
        job.max_speculative_tokens,
        job.new_page_keys(),
      )
    while self._cancelled:
      request_id = self._cancelled.popleft()
      # One that is not known has ended already.
      if request_id in self._jobs:
        self.scheduler.cancel(request_id)
        self._jobs[request_id].cancel()
        self._forget(request_id)

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

  def _forget(self, request_id: int) -> None:
    del self._jobs[request_id]
    self.drafter.forget(request_id)

  def warm_up(self, *, show_progress: bool = False) -> None:
    """Compiles everything, before the first request."""
    warm_up.run(
      self._sizes,
      self._target,
      self.drafter,
      text_size=self._texts.token_ids.shape[1],
      show_progress=show_progress,
    )

  def trial(self, flat: FlatSizes, num_positions: int) -> StepPlan | None:
    """Runs a made-up step of the target and waits, to measure the time.

    Only without requests.

    Args:
      flat: its sizes.
      num_positions: of its longest row, among those that take the context.

    Returns:
      The step, None if none has these sizes.
    """
    step = warm_up.made_up_step(flat, num_positions)
    if step is not None:
      texts = self._texts.token_ids
      warm_up.run_step(self._sizes, self._target, step, texts)
    return step

  def cancel_all(self) -> None:
    """Cancels what has not ended."""
    self._take_news()
    self._cancelled.extend(self._jobs)
    self._take_news()

  def fail(self, error: BaseException) -> None:
    """Ends the waiting of everybody, now and later, with an error."""
    self.error = error
    for job in (*self._jobs.values(), *self._submitted):
      job.handle.fail(error)

  def wake(self) -> None:
    """Ends `wait_for_work`."""
    self._has_work.set()

  def wait_for_work(self) -> None:
    """Waits until there may be something to do."""
    self._has_work.wait()

  def _wait(self, handle: Handle, num_seen: int) -> None:
    if self.is_running:
      handle.wait_for_news(num_seen)
    else:
      self.step()

  def _cancel(self, request_id: int) -> None:
    self._cancelled.append(request_id)
    self._has_work.set()
