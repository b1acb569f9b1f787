"""The way of a request into an engine, and of its news out."""

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax

from swiftspec_jax.config import MAX_TOP_LOGPROBS
from swiftspec_jax.engine import host_sync, jobs, scoring
from swiftspec_jax.engine.handles import EngineError, Handle, failure_of
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.models.model import Model
from swiftspec_jax.requests import Request
from swiftspec_jax.runtime import hosts, sharding
from swiftspec_jax.tree import types


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Text:
  """A text that somebody wants to have rated."""

  token_ids: Sequence[int]
  rating: futures.Future[types.Logprobs] = dataclasses.field(
    default_factory=futures.Future
  )


class Frontend:
  """Takes requests that come at any time; base of `Engine`, which serves them.

  `submit` and `Handle.cancel` may be called from any thread, `step` from one.

  Attributes:
    is_running: whether a thread runs the steps.
    follows_first: whether, of several processes, process 0 tells the others
      of requests; else all submit and cancel the same before each step.
    error: exception that a step has raised; the engine is of no use any more.
    model: the target.
  """

  def __init__(self, model: Model):
    self.model = model
    self.is_running = False
    self.follows_first = True
    self.error: BaseException | None = None
    self._jobs: dict[int, Job] = {}
    self._request_ids = itertools.count()
    self._submitted: collections.deque[Job] = collections.deque()
    self._cancelled: collections.deque[int] = collections.deque()
    self._unrated: collections.deque[_Text] = collections.deque()
    self._has_work = threading.Event()

  @property
  def num_requests(self) -> int:
    """Requests that have not ended."""
    return len(self._jobs) + len(self._submitted)

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
      shows_drafts: whether updates have `draft_nodes`.

    Raises:
      UserError: the prompt is empty or too long, a token is outside the
        vocabulary.
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
      lambda: {
        'submitted': [
          host_sync.job_to_json(self._submitted[i])
          for i in range(num_submitted)
        ],
        'cancelled': [self._cancelled[i] for i in range(num_cancelled)],
        'text': None if text is None else text.token_ids,
        'fact': fact,
      }
    )
    if not sharding.is_first_process():
      if found['text'] is not None:
        text = _Text(token_ids=found['text'])
      self._submitted.extend(map(self._job_of, found['submitted']))
      self._cancelled.extend(found['cancelled'])
    self._take(len(found['submitted']), len(found['cancelled']))
    self._score(text)
    return found['fact']

  def _job_of(self, submitted: dict[str, Any]) -> Job:
    """Returns the job of an entry of `host_sync.job_to_json`."""
    job = self._make_job(
      host_sync.request_of(submitted['request']),
      Handle(submitted['request_id'], self._wait, self._cancel),
      submitted['max_speculative_tokens'],
    )
    job.shows_drafts = submitted['shows_drafts']
    return job

  def _make_job(
    self, request: Request, handle: Handle, max_speculative_tokens: int | None
  ) -> Job:
    config = self.sizes.scheduler
    jobs.check(request, self.model, config)
    return Job(request, handle, self.model, config, max_speculative_tokens)

  def _queue(self, job: Job) -> None:
    self.scheduler.submit(
      job.request_id,
      job.num_known,
      job.max_new_tokens,
      job.max_speculative_tokens,
      job.new_page_keys(),
    )

  def _drop(self, job: Job) -> None:
    self.scheduler.cancel(job.request_id)
    self.drafter.forget(job.request_id)

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
