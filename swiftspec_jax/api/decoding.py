"""Decoding of requests that are all known at the start."""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence

from swiftspec_jax import errors, policies
from swiftspec_jax import requests as requests_lib
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafters import make_drafter
from swiftspec_jax.drafters.spec import DraftSpec
from swiftspec_jax.engine import jobs, left_iterators
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models.model import Model
from swiftspec_jax.policies import auto
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.from_process_zero import FromProcessZero
from swiftspec_jax.requests import Event, Request
from swiftspec_jax.runtime import hosts
from swiftspec_jax.runtime import timeline as timeline_lib
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step import buckets, program_sizes, slot_sampling
from swiftspec_jax.step.program_sizes import ProgramSizes

_PAGE_SIZE = 16
# Slots with rows of the cache. All of them are computed in every step.
_MOST_ROWS = 16
_NARROWEST = 4  # draft tokens and the one before them, if a policy has a choice


class Decoder:
  """Decodes requests with one target, one drafter and `batch_size` rows.

  Drives an `Engine` that is as large as the requests at hand need.

  Attributes:
    max_context: most tokens of a request, prompt and output together.
    host_seconds: sum of `StepRecord.host_seconds`: work of the host, waits
      excluded.
  """

  def __init__(
    self,
    target: Model,
    draft: make_drafter.Draft = None,
    *,
    num_speculative_tokens: int | None = None,
    tree: TreeConfig | None = None,
    policy: policies.Policy | policies.PolicyFn | str | None = None,
    batch_size: int = 1,
    run_ahead: int = 1,
    timeline: timeline_lib.Timeline | None = None,
  ):
    """Checks that the parts fit; compiles and allocates nothing yet.

    Args:
      target: model that defines the output.
      draft: model or drafter, such as `PromptLookup()`, that speculates; None
        for plain decoding.
      num_speculative_tokens: most draft tokens of a round, for drafts without a
        length of their own. By default 4 for the chain of a draft model, and 7
        for others.
      tree: sizes of the token tree that a draft model grows instead of a
        chain. On the target's devices the two take turns. On others the tree
        grows while the target verifies.
      policy: policy, or a function that makes one for the declared sizes
        whenever the caches have grown. It says in each round how much to
        speculate. 'goodput' learns the times of steps and the acceptance, and
        takes what emits most tokens a second, plain decoding included. By
        default a draft is as long as it can be.
      batch_size: rows that decode together (B).
      run_ahead: rounds that are dispatched before one is read; 0 waits for
        each, and so do drafts that need the text on the host.
      timeline: timeline that notes when the programs of a round ran.

    Raises:
      UserError: the draft has another vocabulary or other devices, or a count
        is out of range.
    """
    for name, value, least in (
      ('batch_size', batch_size, 1),
      ('run_ahead', run_ahead, 0),
    ):
      if value < least:
        raise errors.UserError(f'{name} must be at least {least}, got {value}')
    if tree is not None and tree.is_adaptive:
      warnings.warn(
        "TreeConfig(is_adaptive=True) is Decoder(policy='goodput') now; the "
        'old name goes in 0.4',
        DeprecationWarning,
        stacklevel=2,
      )
      tree = dataclasses.replace(tree, is_adaptive=False)
      policy = policy or 'goodput'
    spec = make_drafter.spec_of(draft, tree)
    model = spec.model_for(target)
    self._looks_up = isinstance(policy, str)
    if isinstance(policy, str):
      policy = _policy_of(policy, spec, drafts_by_model=model is not None)
    self.max_context = target.config.max_context
    self.host_seconds = 0.0
    self._target, self._spec = target, spec
    has_policy = policy is not None
    if not spec.runs_ahead(target):
      run_ahead = 0
    self._run_ahead = run_ahead
    self._timeline = timeline
    length = spec.longest(num_speculative_tokens)
    self._declared = _declare(spec, batch_size, length, has_choice=has_policy)
    self._policy = policy or FixedLength(length)
    self._engine: Engine | None = None
    self._lock = threading.Lock()  # held by who uses the engine

  @property
  def engine(self) -> Engine | None:
    """The engine, to look at; None before there was a request."""
    return self._engine

  def run(self, requests: Sequence[Request]) -> Iterator[Event]:
    """Decodes requests; yields news of each as it becomes certain.

    Closing the iterator early stops the decoding. A decoder has room for one
    iterator at a time.

    Raises:
      UserError: an empty prompt, a prompt that leaves no room in the
        context, or a token id outside the vocabulary; at the call, not at
        the first event. At the first event: an earlier iterator of this
        decoder has not ended.
    """
    limits = [self._check(request) for request in requests]
    return self._run(requests, max(limits)) if requests else iter(())

  @left_iterators.closed_at_exit
  def _run(
    self, requests: Sequence[Request], limit: int
  ) -> Generator[Event, None, None]:
    levels = [slot_sampling.level_of(request.sampling) for request in requests]
    with self._own_engine(limit) as engine:
      engine.sampling.least_level = max(levels)  # one program for all of them
      waiting = {
        index: (engine.submit(request), 0)
        for index, request in enumerate(requests)
      }
      while waiting:
        if (record := engine.step()) is not None:
          self.host_seconds += record.host_seconds
        for index, (handle, num_seen) in list(waiting.items()):
          if handle.num_updates > num_seen:
            waiting[index] = handle, handle.num_updates
            text, result = handle.latest.text, handle.latest.result
            if result is not None:
              del waiting[index]
            if text or result is not None:
              yield Event(index=index, text=text, result=result)

  def warmup(
    self,
    max_total_tokens: int,
    sampling: SamplingParams = SamplingParams(),
    *,
    show_progress: str | None = None,
  ) -> None:
    """Readies all programs that requests of up to `max_total_tokens` can need.

    Args:
      max_total_tokens: tokens of a prompt and its output together.
      sampling: parameters that use the same features as the requests to come.
      show_progress: label of a bar on standard error, None for no bar.

    Raises:
      UserError: an iterator of this decoder has not ended.
    """
    limit = min(max_total_tokens, self.max_context)
    with self._own_engine(limit) as engine:
      engine.run_programs(
        slot_sampling.level_of(sampling),
        has_grammar=sampling.structured_outputs is not None,
        show_progress=show_progress,
      )

  @contextlib.contextmanager
  def engine_for(self, requests: Sequence[Request]) -> Iterator[Engine]:
    """Lends an engine with room for some requests, to step it by hand.

    Raises:
      UserError: a request cannot be decoded, or an iterator has not ended.
    """
    with self._own_engine(max(map(self._check, requests))) as engine:
      yield engine

  def _check(self, request: Request) -> int:
    """Returns the length at which a request must end.

    Raises:
      UserError: it cannot be decoded.
    """
    requests_lib.check(
      request, self._target, self.max_context, self._target.name
    )
    num_new = jobs.max_new_tokens(request, self.max_context)
    return len(request.token_ids) + num_new

  @contextlib.contextmanager
  def _own_engine(self, limit: int) -> Iterator[Engine]:
    """Keeps the engine from other users until it ends; it is idle then.

    Args:
      limit: tokens of the longest request. What past requests have taught a
        drafter is lost where there is not enough room for it.
    """
    if not self._lock.acquire(blocking=False):
      raise errors.UserError(
        'this decoder is busy with another iterator of `run`; read that to its '
        'end or `close()` it first, or take another decoder'
      )
    with contextlib.ExitStack() as at_the_end:
      at_the_end.callback(self._lock.release)
      engine = self._engine
      if engine is None or engine.max_context < limit:
        engine = self._engine = None  # free its memory first
        engine = self._engine = self._make_engine(
          min(buckets.power_of_two(limit), self.max_context)
        )
      # The surplus must not delay whoever comes next.
      at_the_end.callback(engine.step)
      at_the_end.callback(engine.cancel_all)
      yield engine

  def _make_engine(self, max_context: int) -> Engine:
    policy, sizes = self._policy, self._sizes(max_context)
    if not isinstance(policy, policies.Policy):
      policy = policy(sizes.scheduler.buckets)
    if hosts.is_together():
      policy = FromProcessZero(policy)
    engine = Engine(
      self._target,
      self._spec,
      sizes=sizes,
      policy=policy,
      looks_up=self._looks_up,
      run_ahead=self._run_ahead,
      timeline=self._timeline,
    )
    engine.follows_first = False
    return engine

  def _sizes(self, max_context: int) -> ProgramSizes:
    """Returns sizes for slots with rows, if the draft and the devices allow."""
    num_rows = self._declared.max_rows
    if (
      not self._spec.needs_pages
      and num_rows <= _MOST_ROWS
      and self._target.config.num_sequence_shards == 1
    ):
      least_tokens = program_sizes.least_tokens(self._target.mesh, num_rows)
      return ProgramSizes.of_rows(self._declared, max_context, least_tokens)
    page_size = _PAGE_SIZE * self._target.config.num_sequence_shards
    return ProgramSizes(
      scheduler=SchedulerConfig(
        buckets=self._declared,
        num_pages=num_rows * -(-max_context // page_size),
        max_context=max_context,
        page_size=page_size,
        shares_prefixes=False,  # as rows do not, so times compare
      ),
      contexts=(max_context,),
    )


def _policy_of(
  name: str, spec: DraftSpec, *, drafts_by_model: bool
) -> policies.PolicyFn:
  """Returns what makes the policy of a name."""
  if name != 'goodput':
    raise errors.UserError(
      f"policy={name!r} must be 'goodput', a Policy or what makes one"
    )
  return functools.partial(
    auto.make, is_tree=spec.makes_trees, drafts_by_model=drafts_by_model
  )


def _declare(
  spec: DraftSpec, num_rows: int, length: int, *, has_choice: bool
) -> StepBuckets:
  """Returns sizes for rows with the longest draft, and for prompts beside them.

  Args:
    spec: source of drafts.
    num_rows: B.
    length: most draft tokens of a row.
    has_choice: whether a policy chooses among shorter drafts, too.
  """
  widths = {1, length + 1}
  width = _NARROWEST
  while has_choice and width <= length:
    widths.add(width)
    width *= 2
  drafted = num_rows * (length + 1)
  beside = drafted if num_rows > 1 else 0
  query_tokens = {num_rows * width for width in widths}
  chunks = (beside + size for size in buckets.CHUNKS)
  query_tokens |= {size for size in chunks if size > drafted}
  lengths = tuple(range(length + 1))
  most_steps = spec.num_forwards(length)
  return StepBuckets(
    rows=(num_rows,),
    query_tokens=tuple(sorted(query_tokens)),
    lengths=lengths,
    draft_steps=tuple(min(n, most_steps) for n in lengths),
  )
