"""What the user of an engine holds of a request."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from swiftspec_jax import requests
from swiftspec_jax.requests import results


class EngineError(RuntimeError):
  """A step has failed; its error is the cause."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
  """News of a request.

  Attributes:
    token_ids: new tokens of the output.
    text_offsets: number of characters of the text before each of them.
    logprobs: log-probabilities of these tokens, if asked for.
    top_logprobs: most probable tokens, as in `GenerationResult`.
    text: new text that is certain; it can lag behind the tokens.
    pieces: text and source of each token.
    num_drafted: draft tokens that were verified in the step of this news.
    draft_nodes: these tokens, parents first, if `Engine.submit` was told to
      show them.
    result: result of the request, in the last news; None before.
  """

  token_ids: tuple[int, ...] = ()
  text_offsets: tuple[int, ...] = ()
  logprobs: tuple[float, ...] | None = None
  top_logprobs: tuple[results.TopLogprobs, ...] | None = None
  text: str = ''
  pieces: tuple[requests.Piece, ...] = ()
  num_drafted: int = 0
  draft_nodes: tuple[requests.DraftNode, ...] = ()
  result: results.GenerationResult | None = None


class Handle:
  """A request that has been submitted.

  Iterate over it, plainly or with `async for`, to get its updates, or ask for
  the `result`. Both can be done from any thread. Without a thread of the engine
  (`background.running`) whoever waits runs its steps.
  """

  def __init__(
    self,
    request_id: int,
    wait: Callable[['Handle', int], None],
    cancel: Callable[[int], None],
  ):
    """For the engine.

    Args:
      request_id: number of the request.
      wait: function of the handle and a number of updates; it returns when
        there may be more updates.
      cancel: function that cancels a request.
    """
    self.request_id = request_id
    self._wait = wait
    self._cancel = cancel
    self._updates: list[Update] = []
    self._error: BaseException | None = None
    self._has_news = threading.Condition()
    self._listeners: list[Callable[[], None]] = []

  @property
  def is_finished(self) -> bool:
    """Whether the result is there."""
    return bool(self._updates) and self._updates[-1].result is not None

  @property
  def num_updates(self) -> int:
    """Updates so far."""
    return len(self._updates)

  @property
  def latest(self) -> Update:
    """The last update; there must be one."""
    return self._updates[-1]

  def cancel(self) -> None:
    """Ends the request before the next step; what there is stays."""
    self._cancel(self.request_id)

  def result(self) -> results.GenerationResult:
    """Waits for the end.

    Raises:
      EngineError: a step has failed.
    """
    *_, last = self
    return last.result

  def __iter__(self) -> Iterator[Update]:
    num_seen = 0
    while not num_seen or self._updates[num_seen - 1].result is None:
      while len(self._updates) <= num_seen:
        self._check()
        self._wait(self, num_seen)
      yield self._updates[num_seen]
      num_seen += 1

  async def __aiter__(self) -> AsyncIterator[Update]:
    loop, has_news = asyncio.get_running_loop(), asyncio.Event()

    def notify():
      if not loop.is_closed():
        loop.call_soon_threadsafe(has_news.set)

    self._listeners.append(notify)
    try:
      num_seen = 0
      while not num_seen or self._updates[num_seen - 1].result is None:
        while len(self._updates) <= num_seen:
          self._check()
          await has_news.wait()
          has_news.clear()
        yield self._updates[num_seen]
        num_seen += 1
    finally:
      self._listeners.remove(notify)

  def wait_for_news(self, num_seen: int) -> None:
    """Waits until there are more updates than `num_seen`, or an error."""
    with self._has_news:
      self._has_news.wait_for(
        lambda: len(self._updates) > num_seen or self._error is not None
      )

  @classmethod
  def of_result(cls, result: results.GenerationResult) -> 'Handle':
    """Returns the handle of a request that has ended without an engine."""
    handle = cls(-1, lambda *_: None, lambda _: None)
    handle.push(Update(result=result))
    return handle

  def push(self, update: Update) -> None:
    """Adds news; for the engine."""
    self._updates.append(update)
    self._notify()

  def fail(self, error: BaseException) -> None:
    """Ends the waiting of everybody with an error; for the engine."""
    self._error = error
    self._notify()

  def _notify(self) -> None:
    with self._has_news:
      self._has_news.notify_all()
    for listener in tuple(self._listeners):
      listener()

  def _check(self) -> None:
    if self._error is not None:
      raise failure_of(self._error)


def failure_of(error: BaseException) -> EngineError:
  """Returns what those get who wait for an engine that has failed."""
  failure = EngineError('the engine has failed')
  failure.__cause__ = error
  return failure
