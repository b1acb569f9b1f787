"""Steps of an engine between being enqueued and being told of.

Legend: B rows that decode, F requests that have ended.
"""

import dataclasses
from typing import Any

import numpy as np

from swiftspec_jax import policies, tree
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.step.slot_drafts import SlotDrafts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
  """What a step did.

  Attributes:
    lengths: i64[B] draft tokens that were verified, of each row that decodes.
    num_levels: i64[B] lengths of these drafts, or depths of trees.
    num_accepted: i64[B] draft tokens that are part of the outputs.
    time: time at the end of the step, in seconds of `time.perf_counter`.
    seconds: duration of the step, compilation left out.
    host_seconds: processor time of the thread that ran it, which waits for the
      devices take nothing of. Where the CPU is also the device, `seconds` have
      waits for a core, too, and small programs may run in this thread.
    outcomes: i64[3] verdicts on persistent trees that were a MISS, a LATE_HIT
      and a HIT, in the order of these numbers in `tree`.
    num_forwards: draft forwards between a verdict and the next proposal, for
      which the target waited.
    draft_plan: plan of the policy, late rows left out.
    prefills_draft: whether the draft model read a chunk of late tokens,
      see `DraftPrefill`.
    step: plan that was run; rows that decode lead.
    ended: i64[F] requests whose output is complete.
    has_grammar: whether an output of the step follows a grammar. No other step
      is enqueued before it is read, as the next masks depend on its tokens.
  """

  lengths: np.ndarray
  num_levels: np.ndarray
  num_accepted: np.ndarray
  time: float
  seconds: float
  host_seconds: float
  draft_plan: policies.DraftPlan
  prefills_draft: bool
  step: StepPlan
  ended: np.ndarray
  has_grammar: bool = False
  outcomes: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(tree.NUM_OUTCOMES, np.int64)
  )
  num_forwards: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unread:
  """A step that was enqueued at `start`."""

  view: policies.StepView
  plan: policies.DraftPlan
  step: StepPlan
  drafts: SlotDrafts
  # Packed verdicts, log-probabilities, drafts of the slots if the host needs
  # them, and how many were found.
  output: tuple[Any, ...]
  start: float
  has_grammar: bool = False

  @property
  def drafted(self) -> np.ndarray:
    """i64[B] tokens of the drafter."""
    own = self.drafts.own_lengths
    return self.drafts.drafts.lengths if own is None else own

  @property
  def verified(self) -> np.ndarray:
    """i64[B] draft tokens."""
    return self.step.lengths[: self.step.num_decoding]


def resolve_lengths(
  unread: Unread, step: StepPlan, num_found: np.ndarray
) -> tuple[Unread, StepPlan]:
  """Returns a step with as many draft tokens as the devices have found.

  Args:
    unread: step.
    step: plan of it, as it was run.
    num_found: i32[U] result of `SlotDrafts.num_found`.
  """
  facts = unread.drafts.drafts
  lengths = np.minimum(facts.lengths, num_found[unread.view.slots])
  facts = dataclasses.replace(facts, lengths=lengths)
  drafts = dataclasses.replace(unread.drafts, drafts=facts)
  lengths = np.minimum(step.lengths, num_found[step.slots])
  return (
    dataclasses.replace(unread, drafts=drafts),
    dataclasses.replace(step, lengths=lengths),
  )
