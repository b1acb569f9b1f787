"""An engine over pages for requests that are all known at the start."""

import dataclasses
from collections.abc import Sequence

from swiftspec_jax import buckets, errors, hosts, policies, requests
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.engine.engine import StepRecord
from swiftspec_jax.engine.handles import Handle
from swiftspec_jax.model import Model
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.from_process_zero import FromProcessZero
from swiftspec_jax.requests import Request
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.serving.drafters import make_drafter
from swiftspec_jax.serving.engine import PageEngine
from swiftspec_jax.step.program_sizes import ProgramSizes

_CHUNK = 128  # tokens of a prompt in a step
_PAGE_SIZE = 16
# Slots with rows of the cache. All of them are computed in every step.
_MOST_ROWS = 16


class ClosedBatch:
  """Decodes with a `PageEngine` that is as large as the requests need.

  Attributes:
    max_context: most tokens of a request, prompt and output together.
    host_seconds: sum of those of all steps so far.
  """

  def __init__(
    self,
    target: Model,
    draft: make_drafter.Draft,
    *,
    num_speculative_tokens: int | None,
    policy: policies.Policy | policies.PolicyFn | None = None,
    batch_size: int,
    run_ahead: int = 0,
  ):
    """Allocates nothing yet.

    Args:
      target: model that defines the output.
      draft: source of drafts, as `PageEngine` takes it.
      num_speculative_tokens: most tokens of a draft, or nodes of a tree without
        its root. By default that of the draft, or else 4 for chains of a model
        and 7 for others.
      policy: policy, or what makes one whenever the caches have grown; by
        default drafts are as long as they may be.
      batch_size: most rows that decode together.
      run_ahead: rounds that are dispatched before one is read, by drafts that
        do not need its text.

    Raises:
      UserError: the draft does not fit the target.
    """
    if batch_size < 1:
      raise errors.UserError(f'batch_size must be at least 1, got {batch_size}')
    make_drafter.model_of(draft, target)
    self.max_context = target.config.max_context
    self.host_seconds = 0.0
    self._target, self._draft = target, draft
    self._length = make_drafter.longest(draft, num_speculative_tokens)
    self._batch_size = batch_size
    self._run_ahead = run_ahead if make_drafter.runs_ahead(draft) else 0
    self._sizes = self._declare()
    self._policy = policy or FixedLength(self._length)
    self._engine: PageEngine | None = None
    self._max_images = 1  # of the requests so far

  @property
  def num_requests(self) -> int:
    """Requests that have not ended."""
    return self._engine.num_requests

  def check(self, request: Request) -> int:
    """Returns the length at which a request must end.

    Raises:
      UserError: it cannot be served.
    """
    num_images = len(request.images)
    limit = requests.limit_of(
      request, self._target, self.max_context, num_images
    )
    self._max_images = max(self._max_images, num_images)
    return limit

  def prepare(
    self, limit: int, sampling: Sequence[SamplingParams] = ()
  ) -> None:
    """Makes room for requests of `limit` tokens; only without requests.

    What past requests have taught a drafter is lost where there is not enough.
    """
    del sampling  # any are served
    engine = self._engine
    if (
      engine is None
      or engine.max_context < limit
      or engine.max_images < self._max_images
    ):
      engine = self._engine = None  # free its memory first
      self._engine = self._make(
        min(buckets.power_of_two(limit), self.max_context)
      )

  def _declare(self) -> StepBuckets:
    num_rows, lengths = self._batch_size, range(self._length + 1)
    # Some sizes between the rows alone and a chunk of a prompt beside them.
    drafts = num_rows * (self._length + 1)
    query_tokens = {num_rows, drafts, drafts + _CHUNK}
    most_steps = make_drafter.num_draft_steps(self._draft, self._length)
    return StepBuckets(
      rows=(num_rows,),
      query_tokens=tuple(sorted(query_tokens)),
      lengths=tuple(lengths),
      draft_steps=tuple(min(n, most_steps) for n in lengths),
    )

  def _make(self, max_context: int) -> PageEngine:
    num_rows, declared = self._batch_size, self._sizes
    if self._has_rows:
      sizes = ProgramSizes.of_rows(declared, max_context)
    else:
      page_size = _PAGE_SIZE * self._target.config.num_sequence_shards
      sizes = ProgramSizes(
        scheduler=SchedulerConfig(
          buckets=declared,
          num_pages=num_rows * -(-max_context // page_size),
          max_context=max_context,
          page_size=page_size,
          shares_prefixes=False,  # as rows do not, so times compare
        ),
        contexts=(max_context,),
      )
    policy = self._policy
    if not isinstance(policy, policies.Policy):
      policy = policy(declared)
    if hosts.is_together():
      policy = FromProcessZero(policy)
    engine = PageEngine(
      self._target,
      self._draft,
      sizes=dataclasses.replace(sizes, max_images=self._max_images),
      policy=policy,
      run_ahead=self._run_ahead,
    )
    engine.follows_first = False
    return engine

  @property
  def _has_rows(self) -> bool:
    """Whether slots have rows; devices share the tokens of pages alone."""
    return (
      not isinstance(self._draft, make_drafter.InPages)
      and self._batch_size <= _MOST_ROWS
      and self._target.config.num_sequence_shards == 1
    )

  def warm_up_to(self, limit: int, sampling: SamplingParams) -> None:
    """Compiles all that requests of up to `limit` tokens need."""
    self.prepare(limit, [sampling])
    self._engine.warm_up()

  def submit(self, request: Request) -> Handle:
    """Takes a request."""
    return self._engine.submit(request)

  def step(self) -> StepRecord | None:
    """Runs a step; returns None if there is nothing to do."""
    record = self._engine.step()
    self.host_seconds += record.host_seconds if record else 0.0
    return record

  def cancel_all(self) -> None:
    """Cancels what has not ended."""
    if self._engine is not None:
      self._engine.cancel_all()

  def drain(self) -> None:
    """Drops the steps that are on their way; only without requests."""
    if self._engine is not None:
      self._engine.step()
