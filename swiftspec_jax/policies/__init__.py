"""Policies: how many tokens to speculate, step by step and row by row.

A policy is asked twice in a step: before drafting, how long the draft of each
row may be, and after it, how much of each draft the target verifies. Zero is
an answer in both. It is told what was accepted.

Legend: B rows that decode in a step, K longest draft.
"""

import abc
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepView:
  """The batch before a step, as a policy sees it.

  Attributes:
    step: number of steps before this one.
    request_ids: i64[B], unique for all time.
    slots: i64[B], places of the rows; a slot is used again for another request.
    kv_lengths: i64[B] committed tokens in the cache, as far as steps are read.
    limits: i64[B] longest draft that each row may have. It is at most what
      remains of the output, less the token that the target adds; it is smaller
      where the request says so, and 0 where there must be no draft.
    num_verified: i64[B] draft tokens of the request verified so far.
    num_accepted: i64[B] draft tokens of the request accepted so far.
    num_prefill_tokens: tokens of prompts that are to share the step.
    prefill_kv_tokens: tokens in the cache of the rows of these prompts.
    max_draft_tokens: room for draft tokens in the step, all rows together:
      what prompts leave, but at least a small share.
    page_size: tokens of a page.
    num_free_pages: pages for draft tokens that no row owns yet.
    num_spare_tokens: i64[B] tokens that fit into the pages of the row after
      the one token that it feeds anyway.
    num_waiting: requests that have not been admitted.
    num_output: i64[B] tokens that the rows have emitted so far.
    num_ahead: i64[B] most tokens that unread steps add to the rows; 0 where
      each step is read before the next one.
    num_unread_tokens: tokens, such as those of prompts, that a draft model has
      to read before it can draft for all rows.
    buckets: the sizes that are compiled.
    num_filling: rows whose prompts are to be fed, in this step or later.
    finds_drafts_late: whether drafts are looked up on the devices, so that the
      host learns too late which rows have one.
    pads_absent_drafts: whether draft tokens that are not found take the place
      of others in the step even if no row has any.
    can_look_up: whether a plan may have `is_lookup`.
  """

  step: int
  request_ids: np.ndarray
  slots: np.ndarray
  kv_lengths: np.ndarray
  limits: np.ndarray
  num_verified: np.ndarray
  num_accepted: np.ndarray
  num_prefill_tokens: int
  prefill_kv_tokens: int
  max_draft_tokens: int
  page_size: int
  num_free_pages: int
  num_spare_tokens: np.ndarray
  num_waiting: int
  num_output: np.ndarray
  buckets: StepBuckets
  num_ahead: np.ndarray | int = 0
  num_unread_tokens: int = 0
  num_filling: int = 0
  finds_drafts_late: bool = False
  pads_absent_drafts: bool = False
  can_look_up: bool = False

  @property
  def num_rows(self) -> int:
    """B."""
    return len(self.request_ids)

  def fitting(self, lengths: np.ndarray) -> np.ndarray:
    """Returns drafts of these lengths i64[B] as they fit into the memory.

    Every row may fill the pages that it owns. Where there are too few free
    pages for all rows, the first rows get them.
    """
    # Mostly there is so much room that the rows need not be looked at.
    most = len(lengths) * -(-self.buckets.max_length // self.page_size)
    if self.num_free_pages >= most:
      return lengths
    missing = np.maximum(lengths - self.num_spare_tokens, 0)
    if not missing.any():
      return lengths
    wanted = -(-missing // self.page_size)
    before = wanted.cumsum() - wanted
    granted = np.clip(self.num_free_pages - before, 0, wanted)
    room = self.num_spare_tokens + granted * self.page_size
    return np.minimum(lengths, room)

  def shortened(self, lengths: np.ndarray) -> np.ndarray:
    """Returns drafts of these lengths i64[B] as they may be.

    What does not fit into the memory is cut as `fitting` says. Where the rest
    does not fit into the step, the longest drafts are cut; what is left of the
    room gives the first of them one token more.
    """
    lengths = cut = self.fitting(np.minimum(lengths, self.limits))
    if int(lengths.sum()) <= self.max_draft_tokens:
      return lengths
    level = int(lengths.max())
    while level and int(cut.sum()) > self.max_draft_tokens:
      level -= 1
      cut = np.minimum(lengths, level)
    is_cut = cut < lengths
    left = self.max_draft_tokens - int(cut.sum())
    return cut + (is_cut & (is_cut.cumsum() <= left))

  def with_drafts_first(self) -> 'StepView':
    """Returns the view in which prompts get what drafts leave of the step."""
    room = self.buckets.max_query_tokens - self.num_rows
    return dataclasses.replace(self, max_draft_tokens=room)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftPlan:
  """What to draft.

  Attributes:
    lengths: i64[B] longest draft of each row.
    is_probe: bool[B] or None: rows whose drafts are wanted for what they tell;
      `plan_verify` keeps a part of them.
    is_first: whether drafts come before prompts, which then get what is left of
      the step.
    is_lookup: whether drafts are looked up in the texts, and the draft model
      does nothing.
    expected_tokens: tokens that the step will emit for the rows; NaN if the
      policy makes no prediction.
    expected_seconds: seconds of the step, or NaN.
  """

  lengths: np.ndarray
  is_probe: np.ndarray | None = None
  is_first: bool = False
  is_lookup: bool = False
  expected_tokens: float = float('nan')
  expected_seconds: float = float('nan')

  @property
  def is_experiment(self) -> bool:
    """Whether the step is to tell something: it has no prediction."""
    return math.isnan(self.expected_tokens)

  def without(self, is_late: np.ndarray) -> 'DraftPlan':
    """Returns the plan without rows bool[B] that cannot be drafted for yet."""
    return dataclasses.replace(self, lengths=np.where(is_late, 0, self.lengths))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Drafts:
  """What was drafted.

  Attributes:
    lengths: i64[B] numbers of draft tokens, at most those of the plan; 0 for a
      row without a draft.
    confidences: f64[K, B] the drafter's estimates of the probability that each
      draft token is accepted if those before it are; or None.
    node_confidences: function, or None where nothing drafts trees. It returns
      f64[K, B], not rising along K: the drafter's estimates of the probability
      that each node is accepted. The first call may wait for the devices.
  """

  lengths: np.ndarray
  confidences: np.ndarray | None = None
  node_confidences: Callable[[], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LookedUp:
  """What prompt lookup would have drafted, as the texts tell later.

  Attributes:
    num_asked: i64[B] places of the text that were looked up.
    num_found: i64[B] places for which there was a chain.
    num_reached: i64[K, B] chains that were right up to a token.
    num_right: i64[K, B] of them those in which it was right, too.
  """

  num_asked: np.ndarray
  num_found: np.ndarray
  num_reached: np.ndarray
  num_right: np.ndarray

  @classmethod
  def none(cls, length: int, num_rows: int) -> 'LookedUp':
    """Returns counts of 0 for chains of up to K tokens in B rows."""
    num_asked, num_found = np.zeros((2, num_rows), np.int64)
    num_reached, num_right = np.zeros((2, length, num_rows), np.int64)
    return cls(
      num_asked=num_asked,
      num_found=num_found,
      num_reached=num_reached,
      num_right=num_right,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
  """What the target said.

  Attributes:
    view: the batch before the step.
    plan: the plan for rows that could have a draft.
    drafts: the drafts that were made.
    lengths: i64[B] numbers of draft tokens that were verified.
    num_accepted: i64[B] numbers of them that were accepted, whether or not the
      output ended among them.
    accepted_ranks: i64[D, B], for trees: places of the accepted nodes in the
      proposal, counted from 0 without the root; -1 where there is none. None
      for chains, which accept the first `num_accepted`.
    seconds: duration of the step.
    is_usable: bool[B], whether the row tells about its drafter. It does not
      where a grammar or a bias has changed what the target would have said.
    num_fed: draft tokens of all rows that were fed, where that is more than
      was found; None where it is the sum of `lengths`.
    prefills_draft: whether a draft model read late tokens in the step.
    looked_up: drafts that lookups would have made since they were last told;
      None where nothing is told.
  """

  view: StepView
  plan: DraftPlan
  drafts: Drafts
  lengths: np.ndarray
  num_accepted: np.ndarray
  seconds: float
  accepted_ranks: np.ndarray | None = None
  is_usable: np.ndarray | bool = True
  num_fed: int | None = None
  prefills_draft: bool = False
  looked_up: LookedUp | None = None


class Policy(abc.ABC):
  """Decides how much to speculate.

  By default what was drafted is verified, and nothing is learned.
  """

  @abc.abstractmethod
  def plan_draft(self, view: StepView) -> DraftPlan:
    """Returns the longest draft of each row, before drafting."""

  def plan_verify(
    self, view: StepView, plan: DraftPlan, drafts: Drafts
  ) -> np.ndarray:
    """Returns how many tokens of each draft to verify, i64[B]."""
    del view, plan
    return drafts.lengths

  def observe(self, outcome: Outcome) -> None:
    """Takes the outcome of a step, in the order of the steps."""
    del outcome


# Makes a policy for the sizes that an engine is compiled for.
PolicyFn = Callable[[StepBuckets], Policy]


def ask(
  policy: Policy, view: StepView, least: np.ndarray | int = 0
) -> tuple[StepView, DraftPlan]:
  """Returns what to draft as it fits, and the view that this is planned in.

  Args:
    policy: policy to ask.
    view: batch before the step.
    least: i64[B] draft tokens of the rows that are certain, whatever it says.
  """
  plan = policy.plan_draft(view)
  lengths = np.maximum(plan.lengths, least)
  if lengths.any():
    if plan.is_first:
      view = view.with_drafts_first()
    lengths = view.shortened(lengths)  # what cannot be verified is not drafted
  return view, dataclasses.replace(plan, lengths=lengths)
