"""The serving engine: continuous batching with speculation.

A step schedules, drafts, runs the target over the tokens of all rows, and
commits what stands. The scheduler says which rows there are, the policy how
far each of them is drafted for, and neither ever causes a compilation.

With `run_ahead` the next steps are enqueued before a step is read. The host
plans them with the most tokens that rows may have; the devices know how many.

Legend: R rows of a step, B of them decode, U slots, K longest draft.
"""

import collections
import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters import make_drafter
from swiftspec_jax.drafters.device_drafter import DeviceDrafter
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.spec import Setup
from swiftspec_jax.drafters.texts.lookup_hindsight import LookupHindsight
from swiftspec_jax.engine import warm_up
from swiftspec_jax.engine.frontend import Frontend
from swiftspec_jax.engine.grammar_steps import GrammarSteps
from swiftspec_jax.engine.programs import Programs
from swiftspec_jax.engine.step_reader import StepReader
from swiftspec_jax.engine.steps import StepRecord, Unread
from swiftspec_jax.models.model import Model
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.runtime import sharding
from swiftspec_jax.runtime import timeline as timeline_lib
from swiftspec_jax.scheduling.scheduler import Scheduler
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.step import buckets, step_input, target_forward
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.slot_sampling import SamplingLevel
from swiftspec_jax.step.target import Target
from swiftspec_jax.tree import types


class Engine(Frontend):
  """Decodes over pages that requests share, with a policy of how much to draft.

  Attributes:
    sizes: sizes that everything is compiled for.
    max_rows: requests that decode together.
    max_context: tokens of a request, prompt and output together.
    max_draft_tokens: draft tokens that a row can accept in a step.
    programs: compiled programs.
    scheduler: queue, slots and pages, to look at.
    drafter: drafter, to look at.
    sampling: sampling of the slots; its `least_level` may be set.
  """

  def __init__(
    self,
    target: Model,
    draft: make_drafter.Draft = None,
    *,
    sizes: ProgramSizes,
    policy: policies.Policy | None = None,
    looks_up: bool = False,
    run_ahead: int = 0,
    timeline: timeline_lib.Timeline | None = None,
  ):
    """Allocates the caches; `warm_up` compiles, or `programs.start`.

    Args:
      target: model that decides every token of the output.
      draft: source of drafts. A draft model makes chains, and so does
        `SelfDraft`; in a `TreeDraft` or `PersistentTrees` it makes trees.
        Others are a lookup, a `Datastore`, a `HostDrafter` and a
        `StatelessDrafter`. None is plain decoding.
      sizes: sizes that everything is compiled for.
      policy: policy that decides how much to speculate; by default nothing is.
      looks_up: whether the policy may have drafts looked up instead, if the
        drafts of the model have lookups in them, and learns from each text what
        lookups are worth.
      run_ahead: steps that are enqueued before one is read; 0 reads each before
        the next. More takes `PersistentTrees`, a lookup or drafter on the
        devices, or no draft, as others need the text.
      timeline: timeline that notes when the programs of a step ran.

    Raises:
      UserError: the sizes or the draft do not fit the target, the target
        insists on kernels that cannot do its steps, or `run_ahead` does not fit
        the draft.
    """
    config = sizes.scheduler
    if config.max_context > target.config.max_context:
      raise errors.UserError(
        f'max_context={config.max_context} is more than the '
        f'{target.config.max_context} tokens that {target.name} takes'
      )
    super().__init__(target)
    self.max_rows = config.buckets.max_rows
    self.max_context = config.max_context
    self.max_draft_tokens = config.buckets.max_length
    self.scheduler = Scheduler(config)
    self.sizes = sizes
    spec = make_drafter.spec_of(draft)
    model = spec.model_for(target)
    self._target = Target(
      target,
      sizes,
      takes_trees=spec.makes_trees,
      feature_layers=model.config.feature_layers if model else (),
    )
    self.sampling = self._target.sampling
    target_forward.check_kernels(target, sizes)
    self._run_ahead = run_ahead
    self._timeline = timeline
    setup = Setup(
      target=self._target,
      sizes=sizes,
      run_ahead=run_ahead,
      timeline=timeline,
    )
    self.drafter = make_drafter.make(spec, setup)
    lookup = make_drafter.lookup_of(spec, setup) if looks_up else None
    self._lookup = lookup.make(setup) if lookup and model else None
    self._drafters = [x for x in (self.drafter, self._lookup) if x is not None]
    self.programs = Programs(sizes, self._target, self._drafters)
    # Of how much to draft; may be replaced between steps.
    self.policy = policy or FixedLength()
    self._unread: collections.deque[Unread] = collections.deque()
    self._texts = SlotTexts.empty(
      config.max_context, self.scheduler.table.pages
    )
    self._grammars = GrammarSteps(self._target, self._jobs)
    self._reader = StepReader(
      self.scheduler,
      self._target,
      self.drafter,
      self._jobs,
      self._texts,
      drafts_by_model=model is not None,
      hindsight=lookup and LookupHindsight(lookup, self.max_rows),
      timeline=timeline,
    )

  @property
  def cache_usage(self) -> float:
    """Share of the KV cache that is in use, 0 to 1."""
    return 1 - self.scheduler.table.num_free / self.scheduler.config.num_pages

  def step(self) -> StepRecord | None:
    """Reads a step, after those that are enqueued for the rows at hand.

    Returns:
      What the step did; None if there is nothing to do.
    """
    work = time.thread_time()
    self.programs.take(self._take_news_of_first(self.programs.num_ready))
    if not self._jobs:
      self._unread.clear()
    while len(self._unread) <= self._run_ahead and self._enqueue():
      pass
    if not self._unread:
      return None
    return self._reader.read(self._unread.popleft(), self.policy, work)

  def _enqueue(self) -> bool:
    """Enqueues a step, unless others have to be read before or no row runs.

    Nothing is enqueued after a step of prompts alone: a first token must not
    wait until the programs of the next step are compiled.
    """
    if self._unread and (
      self.scheduler.is_short
      or not self._unread[-1].step.num_decoding
      or self._grammars.hold_up(self._unread[-1])
    ):
      return False
    view = self.scheduler.begin_step()
    if view is None:
      return False
    start = time.perf_counter()
    if self._timeline is not None:
      self._timeline.start_round()
    self._assign()
    forced = self._grammars.num_forced(view)
    view, plan = policies.ask(self.policy, self._described(view), forced)
    drafts = self._draft(view, plan, forced)
    if drafts.is_late is not None:
      plan = plan.without(drafts.is_late)
    lengths = self.policy.plan_verify(view, plan, drafts.drafts)
    if forced.any():
      lengths = view.shortened(np.maximum(lengths, forced))
    lengths = np.minimum(lengths, drafts.drafts.lengths)
    step = self.scheduler.plan_step(view, lengths)
    verdicts, logprobs, found = self._dispatch(step, drafts)
    drafts = found or drafts
    needed = self._needed_on_host(step, drafts)
    unread = Unread(
      view=view,
      plan=plan,
      step=step,
      drafts=drafts,
      output=sharding.everywhere(
        (verdicts, logprobs, needed, drafts.num_found)
      ),
      start=start,
      has_grammar=self._grammars.are_in(step),
    )
    self.drafter.overlap(view, unread.drafted, unread.verified)
    self._unread.append(unread)
    if self._timeline is not None:
      self._timeline.host('dispatch', start, time.perf_counter())
    return True

  def _described(self, view: policies.StepView) -> policies.StepView:
    """Returns the view with what the scheduler does not know."""
    known: dict[str, Any] = {
      'num_unread_tokens': self.drafter.num_unread_tokens(view, self._texts)
    }
    if any(isinstance(x, DeviceDrafter) for x in self._drafters):
      known['finds_drafts_late'] = True
      known['pads_absent_drafts'] = not self._target.narrows
    if self._lookup is not None:
      has_grammar = self._target.sampling.has_grammar[view.slots]
      known['can_look_up'] = not has_grammar.any()
    if not self.programs.can_draft(view):
      known['limits'] = np.zeros_like(view.limits)
    return dataclasses.replace(view, **known)

  def _draft(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    forced: np.ndarray,
  ) -> SlotDrafts:
    """Drafts for the rows that the policy names, i64[B] tokens being forced."""
    if not plan.lengths.any():
      return self._target.without_drafts(plan.lengths)
    self.scheduler.reserve(view, plan.lengths)
    # Nobody needs to guess what is known.
    lengths = np.where(forced < plan.lengths, plan.lengths, 0)
    if lengths.any() and plan.is_lookup and self._lookup is not None:
      drafts = self._lookup.draft(view, lengths, self._texts)
      nothing = np.zeros_like(lengths)
      drafts = dataclasses.replace(drafts, own_lengths=nothing)
    elif lengths.any():
      drafts = self.drafter.draft(view, lengths, self._texts)
    else:
      drafts = self._target.without_drafts(lengths)
    return self._grammars.restrict(view, drafts, plan.lengths)

  def _dispatch(
    self, step: StepPlan, drafts: SlotDrafts
  ) -> tuple[jax.Array, types.Logprobs | None, SlotDrafts | None]:
    """Enqueues the target's forward and the verdict."""
    flat = self.programs.fit(step_input.flat_sizes(self.sizes, step))
    dispatched = time.perf_counter()
    output = self._target.dispatch(
      step_input.pack(self.sizes, flat, step, self._texts.page_table),
      flat,
      drafts if step.lengths.any() else None,
      self._target.sampling.level(step.slots),
      find_masks=self._grammars.mask_finder(step, flat),
    )
    if self._timeline is not None:
      after = 'proposal' if step.lengths.any() else None
      self._timeline.program(
        timeline_lib.TARGET, 'verify', dispatched, output[0], after
      )
    return output

  def _needed_on_host(
    self, step: StepPlan, drafts: SlotDrafts
  ) -> types.Array | None:
    """Returns the drafts if the drafter or the user of a request needs them."""
    wants = (self._jobs[i].shows_drafts for i in step.request_ids.tolist())
    if self.drafter.keeps_trees or any(wants):
      return drafts.chains if drafts.trees is None else drafts.trees
    return None

  def reset_drafters(self) -> None:
    """Forgets what ended requests have taught; only without requests."""
    self.drafter.reset()

  def _assign(self) -> None:
    """Writes down the texts of requests that have got a slot."""
    slot_generations = self.scheduler.slot_generations
    is_new = self._texts.slot_generations != slot_generations
    if not is_new.any():
      return
    self._texts.slot_generations[:] = slot_generations
    counts = np.zeros((3, len(is_new)), np.int32)
    for slot in np.flatnonzero(is_new).tolist():
      request_id = int(self.scheduler.request_ids[slot])
      job = self._jobs.get(request_id)
      if job is None:
        continue  # it has left again
      self._texts.token_ids[slot, : job.num_known] = job.known_tokens()
      self._texts.requests[slot] = job.request
      num_prompt_tokens = len(job.request.token_ids)
      counts[:, slot] = job.num_known, num_prompt_tokens, job.limit
      self._target.sampling.set(slot, job.request.sampling)
    lengths, prompt_lengths, max_lengths = counts
    rows = Rows(
      # What is enqueued must not see later changes.
      token_ids=self._texts.token_ids.copy(),
      lengths=lengths,
      prompt_lengths=prompt_lengths,
      max_lengths=max_lengths,
    )
    self._target.assign(rows, is_new)

  def run_programs(
    self,
    level: SamplingLevel,
    *,
    has_grammar: bool = False,
    show_progress: str | None = None,
  ) -> None:
    """Readies all programs for a level of sampling; only without requests.

    All are compiled. Those that read no prompts run, too, for what XLA prepares
    when a program first runs.

    Args:
      level: level of sampling.
      has_grammar: whether outputs follow grammars.
      show_progress: label of a bar on standard error, None for no bar.
    """
    self._target.warm_up()
    self._forget_pages()
    self.programs.compile_all(
      [level], has_grammar=has_grammar, show_progress=show_progress
    )
    for flat in self.programs.steps():
      if self.sizes.is_for_prompts(flat):
        continue
      for length in buckets.text_lengths(flat.context):
        step = warm_up.made_up_step(flat, length)
        run = functools.partial(
          warm_up.run_step, self.sizes, self._target, flat, step, level
        )
        for search in warm_up.searches(flat, self._drafters):
          jax.block_until_ready(run(*search)[0])
        if has_grammar:
          run(has_grammar=True)
      if flat.block_size > 1:
        for drafter in self._drafters:
          drafter.warm_up(flat)

  def trial(self, flat: StepSizes, num_positions: int) -> StepPlan:
    """Runs an invented step of the target and waits, to measure the time.

    Args:
      flat: sizes of the step.
      num_positions: positions of its longest row, among those that take the
        context.

    Returns:
      The step.
    """
    jax.block_until_ready(self.enqueue_trial(flat, num_positions)[0])
    return warm_up.made_up_step(flat, num_positions)

  def enqueue_trial(self, flat: StepSizes, num_positions: int) -> Any:
    """Enqueues an invented step of the target, greedy and without drafts.

    Only without requests. What past ones have left in pages is lost.

    Args:
      flat: sizes of the step.
      num_positions: positions of its longest row, among those that take the
        context.

    Returns:
      What the host would read, and the drafts.
    """
    self._forget_pages()
    step = warm_up.made_up_step(flat, num_positions)
    flat = self.programs.fit(flat)
    return warm_up.run_step(self.sizes, self._target, flat, step)

  def _forget_pages(self) -> None:
    """Readies the pages for invented steps, after the real ones."""
    jax.block_until_ready([unread.output for unread in self._unread])
    self.scheduler.table.forget()
