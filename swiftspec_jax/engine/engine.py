"""What all engines share: the way of a request in, and of its news out."""

import abc
import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from swiftspec_jax import hosts, scoring, sharding, tree, types
from swiftspec_jax.config import MAX_TOP_LOGPROBS
from swiftspec_jax.engine import news
from swiftspec_jax.engine.handles import EngineError, Handle, failure_of
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.engine.programs import Programs
from swiftspec_jax.model import Model
from swiftspec_jax.requests import Request

JobT = TypeVar('JobT', bound=Job)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
  """What a step did.

  Attributes:
    lengths: i64[B] draft tokens that were verified, of each row that decodes.
    num_levels: i64[B] lengths of these drafts, or depths of trees.
    num_accepted: i64[B] draft tokens that are part of the outputs.
    time: time at the end of the step, in seconds of `time.perf_counter`.
    seconds: duration of the step.
    host_seconds: processor time of the thread that ran it, which waits for the
      devices take nothing of. Where the CPU is also the device, `seconds` have
      waits for a core, too, and small programs may run in this thread.
    outcomes: i64[3] verdicts on persistent trees that were a MISS, a LATE_HIT
      and a HIT, in the order of these numbers in `tree`.
    num_forwards: draft forwards between a verdict and the next proposal, for
      which the target waited.
    uses_lookup: whether drafts were looked up while a draft model rested.
  """

  lengths: np.ndarray
  num_levels: np.ndarray
  num_accepted: np.ndarray
  time: float
  seconds: float
  host_seconds: float
  outcomes: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(tree.NUM_OUTCOMES, np.int64)
  )
  num_forwards: int = 0
  uses_lookup: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Text:
  """A text that somebody wants to have rated."""

  token_ids: Sequence[int]
  rating: futures.Future[types.Logprobs] = dataclasses.field(
    default_factory=futures.Future
  )


class Engine(abc.ABC, Generic[JobT]):
  """Serves requests that come at any time.

  `submit` and `Handle.cancel` may be called from any thread, `step` from one.

  Attributes:
    is_running: whether a thread runs the steps.
    follows_first: whether, of several processes, process 0 tells the others
      of requests; else all submit and cancel the same before each step.
    error: exception that a step has raised; the engine is of no use any more.
    model: the target.
  """

  model: Model

  # Of the sizes, which never change.
  max_rows: int  # requests that decode together
  max_context: int  # tokens of a request, prompt and output together
  max_draft_tokens: int  # that a row can accept in a step
  max_images: int = 0  # of a request
  programs: Programs
  limits_drafts: bool  # whether `max_speculative_tokens` may be below that

  def __init__(self):
    self.is_running = False
    self.follows_first = True
    self.error: BaseException | None = None
    self._jobs: dict[int, JobT] = {}
    self._request_ids = itertools.count()
    self._submitted: collections.deque[JobT] = collections.deque()
    self._cancelled: collections.deque[int] = collections.deque()
    self._unrated: collections.deque[_Text] = collections.deque()
    self._has_work = threading.Event()

  @property
  def num_requests(self) -> int:
    """Requests that have not ended."""
    return len(self._jobs) + len(self._submitted)

  @property
  @abc.abstractmethod
  def num_running(self) -> int:
    """Requests with a slot."""

  @property
  @abc.abstractmethod
  def cache_usage(self) -> float:
    """Share of the KV cache that is in use, 0 to 1."""

  @property
  @abc.abstractmethod
  def num_preemptions(self) -> int:
    """Times that a request has lost its slot."""

  def warm_up(self, *, show_progress: bool = False) -> None:
    """Compiles everything, before the first request."""
    self.programs.compile_all(show_progress=show_progress)

  @abc.abstractmethod
  def step(self) -> StepRecord | None:
    """Runs a step; returns None if there is nothing to do."""

  @abc.abstractmethod
  def _make_job(
    self, request: Request, handle: Handle, max_speculative_tokens: int | None
  ) -> JobT:
    """Raises UserError for a request that cannot be served."""

  @abc.abstractmethod
  def _queue(self, job: JobT) -> None:
    """Puts a job at the end of the queue."""

  @abc.abstractmethod
  def _drop(self, job: JobT) -> None:
    """Takes a job that was cancelled out of the queue or its slot."""

  def submit(
    self,
    request: Request,
    *,
    max_speculative_tokens: int | None = None,
    shows_drafts: bool = False,
  ) -> Handle:
    """Takes a request.

    Args:
      request: prompt, and how to continue it.
      max_speculative_tokens: longest draft for it; 0 for none, None leaves it
        to the engine.
      shows_drafts: whether updates have `draft_nodes`; those of an engine of
        rows have none.

    Raises:
      UserError: the prompt is empty or too long, a token is outside the
        vocabulary, or the engine has no limit for single requests.
    """
    handle = Handle(next(self._request_ids), self._wait, self._cancel)
    job = self._make_job(request, handle, max_speculative_tokens)
    job.shows_drafts = shows_drafts
    self._submitted.append(job)
    self._has_work.set()
    if self.error is not None:
      handle.fail(self.error)
    return handle

  def score(self, request: Request) -> futures.Future[types.Logprobs]:
    """Has the target rate a prompt; it reads one between two steps.

    The programs for this are compiled when a length first needs them.

    Args:
      request: prompt, of text alone.

    Returns:
      What `scoring.score` says of all tokens but the first, with
      `MAX_TOP_LOGPROBS` others in each place, or those of a smaller
      vocabulary.

    Raises:
      UserError: the request cannot be served.
    """
    self._make_job(request, Handle(-1, self._wait, self._cancel), None)
    text = _Text(token_ids=request.token_ids)
    self._unrated.append(text)
    self._has_work.set()
    if self.error is not None:
      self.fail(self.error)
    return text.rating

  def cancel_all(self) -> None:
    """Cancels what has not ended."""
    for text in tuple(self._unrated):
      text.rating.cancel()
    self._take_news()
    self._cancelled.extend(self._jobs)
    self._take_news()

  def fail(self, error: BaseException) -> None:
    """Ends the waiting of everybody, now and later, with an error."""
    self.error = error
    for job in (*self._jobs.values(), *self._submitted):
      job.handle.fail(error)
    for text in tuple(self._unrated):
      with contextlib.suppress(futures.InvalidStateError):  # has ended
        text.rating.set_exception(failure_of(error))

  def wake(self) -> None:
    """Ends `wait_for_work`."""
    self._has_work.set()

  def wait_for_work(self) -> None:
    """Waits until there may be something to do."""
    self._has_work.wait()

  def _take_news(self) -> None:
    """Learns what was submitted and cancelled since the last step."""
    self._has_work.clear()
    self._take(*self._count_news())
    self._score(self._next_text())

  def _take_news_of_first(self, fact: Any) -> Any:
    """Takes the news of process 0, if others follow that, or else its own.

    Returns:
      Its `fact`, a JSON value.
    """
    if not (hosts.is_together() and self.follows_first):
      self._take_news()
      return fact
    self._has_work.clear()
    num_submitted, num_cancelled = self._count_news()
    text = self._next_text()
    found = hosts.from_process_zero(
      lambda: news.to_json(
        [self._submitted[i] for i in range(num_submitted)],
        [self._cancelled[i] for i in range(num_cancelled)],
        None if text is None else text.token_ids,
        fact,
      )
    )
    if not sharding.is_first_process():
      if found['text'] is not None:
        text = _Text(token_ids=found['text'])
      self._submitted.extend(map(self._job_of, found['submitted']))
      self._cancelled.extend(found['cancelled'])
    self._take(len(found['submitted']), len(found['cancelled']))
    self._score(text)
    return found['fact']

  def _job_of(self, submitted: dict[str, Any]) -> JobT:
    """Returns the job of an entry of `news.to_json`."""
    job = self._make_job(
      news.request_of(submitted['request']),
      Handle(submitted['request_id'], self._wait, self._cancel),
      submitted['max_speculative_tokens'],
    )
    job.shows_drafts = submitted['shows_drafts']
    return job

  def _count_news(self) -> tuple[int, int]:
    """Returns the numbers of requests submitted and cancelled so far."""
    # In this order: what is cancelled has been submitted before.
    num_cancelled = len(self._cancelled)
    return len(self._submitted), num_cancelled

  def _take(self, num_submitted: int, num_cancelled: int) -> None:
    """Learns of the first ones."""
    for _ in range(num_submitted):
      job = self._submitted.popleft()
      self._jobs[job.request_id] = job
      self._queue(job)
    for _ in range(num_cancelled):
      # One that is not known has ended already.
      job = self._jobs.pop(self._cancelled.popleft(), None)
      if job is not None:
        self._drop(job)
        job.cancel()

  def _next_text(self) -> _Text | None:
    """Returns a text that is to be rated before this step."""
    while self._unrated:
      text = self._unrated.popleft()
      if text.rating.set_running_or_notify_cancel():
        self._has_work.set()  # there may be more
        return text
    return None

  def _score(self, text: _Text | None) -> None:
    if text is None:
      return
    num_top = min(MAX_TOP_LOGPROBS, self.model.config.vocab_size)
    try:
      rated = scoring.score(self.model, text.token_ids, 1, num_top)
    except BaseException as error:
      reason = f'the target could not rate this prompt: {error}'
      text.rating.set_exception(EngineError(reason))
      # Without memory for a text of this length others can still go on.
      if not isinstance(error, jax.errors.JaxRuntimeError):
        raise
    else:
      text.rating.set_result(rated)

  def _wait(self, handle: Handle, num_seen: int) -> None:
    if self.is_running:
      handle.wait_for_news(num_seen)
    else:
      self.step()

  def _cancel(self, request_id: int) -> None:
    self._cancelled.append(request_id)
    self._has_work.set()
