"""Steps that have run: what came of them, and who is told.

Legend: R rows of a step, B of them decode, U slots.
"""

import dataclasses
import time

import jax
import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import EngineDrafter, SlotTexts
from swiftspec_jax.drafters.texts.lookup_hindsight import LookupHindsight
from swiftspec_jax.engine import steps
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.engine.steps import StepRecord, Unread
from swiftspec_jax.runtime import profiling
from swiftspec_jax.runtime import timeline as timeline_lib
from swiftspec_jax.scheduling.scheduler import Scheduler
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.step.slot_drafts import verdicts_of
from swiftspec_jax.step.target import Target
from swiftspec_jax.step.verdicts import Verdicts
from swiftspec_jax.tree import types


class StepReader:
  """Waits for steps, and hands out what came of them.

  Requests get their tokens, the scheduler learns how long the rows are, and the
  drafter and the policy learn what was accepted.
  """

  def __init__(
    self,
    scheduler: Scheduler,
    target: Target,
    drafter: EngineDrafter,
    jobs: dict[int, Job],
    texts: SlotTexts,
    *,
    drafts_by_model: bool,
    hindsight: LookupHindsight | None,
    timeline: timeline_lib.Timeline | None,
  ):
    """Has read nothing yet.

    Args:
      scheduler: scheduler of the steps.
      target: target of the engine, which knows the sampling of the slots.
      drafter: drafter of the engine.
      jobs: requests of the engine by their numbers; those that end are taken
        out.
      texts: texts of the slots; written.
      drafts_by_model: whether the drafter is a model.
      hindsight: reader of the texts that tells the policy what lookups would
        have drafted.
      timeline: timeline that notes waits, and the work after them.
    """
    self._timeline = timeline
    self._scheduler = scheduler
    self._target = target
    self._drafter, self._drafts_by_model = drafter, drafts_by_model
    self._hindsight = hindsight
    self._jobs = jobs
    self._texts = texts
    self._max_nodes = scheduler.config.buckets.max_length + 1
    self._last_read = 0.0  # time

  def read(
    self, unread: Unread, policy: policies.Policy, work: float
  ) -> StepRecord:
    """Waits for the oldest step, and takes what came of it.

    Args:
      unread: step.
      policy: policy that is told.
      work: processor time of this thread at which the work for the record has
        begun, in seconds of `time.thread_time`.
    """
    start = time.perf_counter()
    packed, logprobs, drafted, num_found = _on_host(unread)
    arrived = time.perf_counter()
    step, is_present = self._scheduler.settled(unread.step)
    decoding = slice(step.num_decoding)
    view = unread.view
    if step is not unread.step:  # now it is known where the rows were
      view = dataclasses.replace(
        view, kv_lengths=step.starts[decoding], num_ahead=0
      )
    if num_found is not None:
      unread, step = steps.resolve_lengths(unread, step, num_found)
    report = None
    if self._drafter.keeps_trees and unread.drafted.any():
      report = drafted[:, -3:]
    rows = is_present[decoding]
    lengths, step = step.lengths[decoding], step.only(is_present)
    verdicts = self._verdicts(packed[view.slots])
    accepted, ended = self._commit(
      unread, step, is_present, packed, (logprobs, drafted), report
    )
    for request_id in ended.tolist():
      self._drafter.forget(request_id)
    end = time.perf_counter()
    begun = max(unread.start, self._last_read)
    # A size whose program was compiled in a step would seem to be slow.
    seconds = end - begun - profiling.compile_seconds(begun)
    self._drafter.commit(
      view, unread.drafted, unread.verified, verdicts.num_accepted, rows
    )
    looked_up = None
    if self._hindsight is not None:
      num_new = accepted[: step.num_decoding] + 1
      looked_up = self._hindsight.look_back(view, self._texts, rows, num_new)
    policy.observe(
      self._outcome(unread, view, rows, lengths, verdicts, seconds, looked_up)
    )
    # What a policy does is no part of the next step: its first fit may have to
    # wait until scipy is imported.
    self._last_read = time.perf_counter()
    if self._timeline is not None:
      self._timeline.host('wait', start, arrived)
      self._timeline.host('read', arrived, time.perf_counter())
    return StepRecord(
      lengths=step.lengths[: step.num_decoding],
      num_levels=np.minimum(verdicts.num_levels, lengths)[rows],
      num_accepted=accepted[: step.num_decoding],
      draft_plan=unread.plan,
      prefills_draft=unread.drafts.prefills_draft,
      step=step,
      ended=ended,
      has_grammar=unread.has_grammar,
      time=end,
      seconds=seconds,
      host_seconds=time.thread_time() - work,
      **verdicts_of(report),
    )

  def _outcome(
    self,
    unread: Unread,
    view: policies.StepView,
    rows: np.ndarray,
    lengths: np.ndarray,
    verdicts: Verdicts,
    seconds: float,
    looked_up: policies.LookedUp | None,
  ) -> policies.Outcome:
    """Returns what a policy is told.

    Args:
      unread: step that was read.
      view: view of where its rows were.
      rows: bool[B] rows whose requests have not ended before.
      lengths: i64[B] draft tokens that were verified.
      verdicts: verdicts on them.
      seconds: duration of the step, compilation left out.
      looked_up: drafts that lookups would have made, if they are told.
    """
    drafts, num_fed = unread.drafts, int(unread.verified.sum())
    finds_none = drafts.num_found is not None and not lengths.any()
    if self._target.narrows and finds_none:
      num_fed = 0
    ranks = None
    if self._target.takes_trees:
      path = np.zeros((0, view.num_rows), np.int64)
      if verdicts.tree is not None:
        path = verdicts.tree.path[:, 1:].T
      is_accepted = np.arange(len(path))[:, None] < verdicts.num_accepted
      ranks = np.where(is_accepted, path - 1, -1)
    is_usable = self._target.sampling.is_usable(
      view.slots, for_model=self._is_by_model(unread)
    )
    return policies.Outcome(
      view=view,
      plan=unread.plan,
      drafts=drafts.drafts,
      lengths=lengths,
      num_accepted=verdicts.num_accepted,
      accepted_ranks=ranks,
      seconds=seconds,
      is_usable=is_usable & rows,
      num_fed=num_fed,
      prefills_draft=drafts.prefills_draft,
      looked_up=looked_up,
    )

  def _commit(
    self,
    unread: Unread,
    step: StepPlan,
    is_present: np.ndarray,
    packed: np.ndarray,
    extras: tuple[types.Logprobs | None, np.ndarray | None],
    report: np.ndarray | None,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Appends what stands to the outputs.

    Args:
      unread: step that was read.
      step: plan of it for the R rows whose requests have not ended before.
      is_present: mask of these among all its rows.
      packed: packed verdicts on the drafts of all slots.
      extras: log-probabilities and drafts of all slots, for who asked for them.
      report: report of the drafts, by slot, if they have one.

    Returns:
      i64[R] draft tokens that are part of the outputs, and the requests i64[F]
      that have ended.
    """
    num_accepted = np.zeros(len(step.slots), np.int64)
    is_ended = np.zeros(len(step.slots), bool)
    is_wanted = any(x is not None for x in extras)
    for i in np.flatnonzero(step.is_sampled).tolist():
      slot, job = int(step.slots[i]), self._jobs[int(step.request_ids[i])]
      known = job.num_known
      own = extras
      if is_wanted:
        own = jax.tree.map(lambda x, slot=slot: x[slot], extras)
      new = job.push(
        self._verdicts(packed[slot]),
        int(step.lengths[i]),
        *own,
        None if report is None else report[slot],
        by_model=self._is_by_model(unread),
      )
      self._texts.token_ids[slot, known : known + len(new)] = new
      self._scheduler.table.add_keys(slot, job.new_page_keys())
      # A stop inside of accepted tokens cuts them.
      num_accepted[i] = len(new) - 1
      is_ended[i] = job.is_finished
    planned = unread.step.only(is_present)
    ended = self._scheduler.commit(planned, num_accepted, is_ended)
    for request_id in ended.tolist():
      del self._jobs[request_id]
    return num_accepted, ended

  def _is_by_model(self, unread: Unread) -> bool:
    return self._drafts_by_model and not unread.plan.is_lookup

  def _verdicts(self, packed: np.ndarray) -> Verdicts:
    return Verdicts.unpack(packed, self._max_nodes)


def _on_host(unread: Unread) -> tuple:
  """Waits for what the devices say of a step; returns it as it is there."""
  packed, logprobs, drafted, num_found = unread.output
  packed = np.asarray(packed).astype(np.int64)
  if logprobs is not None:
    logprobs = jax.device_get(logprobs)
  if drafted is not None:
    drafted = np.asarray(drafted)
  if num_found is not None:
    num_found = np.asarray(num_found)
  return packed, logprobs, drafted, num_found
