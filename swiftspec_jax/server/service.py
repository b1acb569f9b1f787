"""What all requests of a server share, and how much of them it takes on.

One call over HTTP is one or several requests of the engine: prompts times
choices.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent import futures
from typing import TypeAlias

import fastapi

from swiftspec_jax import errors
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.engine.handles import Handle, Update
from swiftspec_jax.models.model import Model
from swiftspec_jax.requests import Request, results
from swiftspec_jax.requests.results import GenerationResult
from swiftspec_jax.server import tool_calls
from swiftspec_jax.server.metrics import Metrics
from swiftspec_jax.server.prompts import PromptEncoder
from swiftspec_jax.server.schema import Body
from swiftspec_jax.tree import types

Rating: TypeAlias = futures.Future[types.Logprobs]

_RETRY_AFTER = {'Retry-After': '1'}  # seconds


class Service:
  """An engine behind a queue of limited length.

  All but `drain` is for the thread of the event loop.

  Attributes:
    engine: engine that a thread runs.
    model: the target.
    name: name of the model, for clients.
    encoder: encoder of prompts.
    call_format: name of the format in which the model calls tools, as in
      `tool_calls`; None if it is not known.
    created: time at which this was made, in seconds since 1970.
    metrics: figures of everything that is served.
    is_draining: no more calls are taken.
    num_open: number of requests that have not been answered.
  """

  def __init__(
    self,
    engine: Engine,
    model: Model,
    *,
    name: str | None = None,
    max_waiting: int = 128,
    tool_call_parser: str | None = None,
  ):
    """Nothing is served yet.

    Args:
      engine: engine that is warmed up, or warming up.
      model: target of the engine.
      name: name of the model, for clients; its own by default.
      max_waiting: most requests that may wait for a slot.
      tool_call_parser: name of the format in which the model calls tools, a
        key of `tool_calls.FORMATS`; by default as its tokenizer shows.
    """
    self.engine = engine
    self.model = model
    self.name = name or model.name
    self.encoder = PromptEncoder(model.tokenizer, engine.max_context)
    self.call_format = tool_call_parser or tool_calls.format_of(model.tokenizer)
    self.created = int(time.time())
    self.metrics = Metrics(engine, self.name)
    self.is_draining = False
    self._capacity = engine.max_rows + max_waiting
    self.num_open = 0
    self._on_idle: Callable[[], None] | None = None

  def check_model(self, name: str | None) -> None:
    """Raises HTTPException for the name of another model; None is no name."""
    if name not in (None, self.name):
      raise fastapi.HTTPException(
        404, f'there is no model {name!r}; this server has {self.name!r}'
      )

  def check_number(self, num_requests: int) -> None:
    """Raises UserError for more requests than there ever is room for."""
    if num_requests > self._capacity:
      raise errors.UserError(
        f'this is {num_requests} requests, prompts times n; the server takes '
        f'at most {self._capacity} at a time'
      )

  def open(
    self,
    requests: Sequence[Request],
    body: Body,
  ) -> 'Call':
    """Submits the requests of a call.

    Args:
      requests: requests of the call, prompts times n.
      body: fields of the call.

    Raises:
      HTTPException: there is no room now.
      UserError: a request cannot be served.
    """
    if self.is_draining:
      raise fastapi.HTTPException(503, 'the server is shutting down')
    if self.num_open + len(requests) > self._capacity:
      raise fastapi.HTTPException(
        429,
        f'{self.num_open} requests are running or waiting, of at most '
        f'{self._capacity}; try again later',
        _RETRY_AFTER,
      )
    handles: list[Handle] = []
    ratings: list[Rating] = []
    try:
      for request in requests[:: body.n] if body.scores_prompts else ():
        ratings.append(self.engine.score(request))
      for request in requests:
        if body.max_new_tokens == 0:
          stats = results.GenerationStats(prompt_tokens=len(request.token_ids))
          result = results.GenerationResult(
            text='', token_ids=(), finish_reason='length', stats=stats
          )
          handle = Handle.of_result(result)
        else:
          handle = self.engine.submit(
            request,
            max_speculative_tokens=body.max_speculative_tokens,
            shows_drafts=body.stream_options.include_draft_nodes,
          )
        handles.append(handle)
    except errors.UserError:
      for started in (*handles, *ratings):
        started.cancel()
      raise
    self.num_open += len(handles)
    return Call(handles, ratings, self._close, self.metrics)

  def drain(self, on_idle: Callable[[], None]) -> None:
    """Takes no more calls; has `on_idle` called when those that run end."""
    self._on_idle = on_idle
    self.is_draining = True
    if self.num_open == 0:
      on_idle()

  def _close(self, num_requests: int) -> None:
    self.num_open -= num_requests
    if self.is_draining and self.num_open == 0:
      self._on_idle()


class Call:
  """The requests of a call; those that have not ended are cancelled at its end.

  Attributes:
    handles: handles of the requests.
  """

  def __init__(
    self,
    handles: Sequence[Handle],
    ratings: Sequence[Rating],
    on_close: Callable[[int], None],
    metrics: Metrics,
  ):
    """For the service.

    Args:
      handles: handles of the requests.
      ratings: log-probabilities of prompts, to come.
      on_close: function that is called with the number of requests.
      metrics: are told what happens.
    """
    self.handles = handles
    self._ratings = ratings
    self._on_close = on_close
    self._metrics = metrics

  @property
  def summary(self) -> str:
    """What came of the requests that have ended, for a log."""
    ended = [h.latest.result for h in self.handles if h.is_finished]
    stats = [result.stats for result in ended]
    return (
      f'{sum(x.prompt_tokens for x in stats)} prompt tokens, '
      f'{sum(x.new_tokens for x in stats)} new, '
      f'{results.total_acceptance_length(stats):.2f} a round, '
      f'{", ".join(sorted({result.finish_reason for result in ended}))}'
    )

  async def updates(self) -> AsyncIterator[tuple[int, Update]]:
    """Yields news of the requests as they come, with their index."""
    streams = list(map(aiter, self.handles))
    times: list[float | None] = [None] * len(streams)
    tasks = {
      asyncio.ensure_future(anext(stream)): i
      for i, stream in enumerate(streams)
    }
    try:
      while tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
          i, update = tasks.pop(task), task.result()
          now = time.perf_counter()
          gap = None if times[i] is None else now - times[i]
          self._metrics.note_update(update, gap)
          times[i] = now
          yield i, update
          if update.result is None:
            tasks[asyncio.ensure_future(anext(streams[i]))] = i
    finally:
      for task in tasks:
        task.cancel()

  async def ratings(self) -> list[types.Logprobs]:
    """Waits for the log-probabilities of prompts."""
    return await asyncio.gather(*map(asyncio.wrap_future, self._ratings))

  async def results(self) -> list[GenerationResult]:
    """Waits for all requests."""
    async for _ in self.updates():
      pass
    return [handle.result() for handle in self.handles]

  def close(self) -> None:
    """Cancels what has not ended."""
    for rating in self._ratings:
      rating.cancel()
    for handle in self.handles:
      if not handle.is_finished:
        handle.cancel()
        self._metrics.note_abort()
    self._on_close(len(self.handles))
