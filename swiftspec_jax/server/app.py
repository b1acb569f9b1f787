"""The endpoints."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import (
  AsyncIterator,
  Callable,
  Coroutine,
  Mapping,
  Sequence,
)
from typing import Any, TypeVar

import fastapi
from fastapi import responses
from starlette.middleware.cors import CORSMiddleware

import swiftspec_jax as ss
from swiftspec_jax.engine import handles
from swiftspec_jax.requests import grammar
from swiftspec_jax.server import (
  answer_types,
  answers,
  fill_in,
  page_endpoint,
  refusals,
  request_log,
  schema,
  status,
  tokens,
  tool_choice,
)
from swiftspec_jax.server import prompts as prompt_lib
from swiftspec_jax.server.chat_answers import ChatFormat
from swiftspec_jax.server.completion_answers import CompletionFormat
from swiftspec_jax.server.guard import Guard
from swiftspec_jax.server.responses_answers import ResponsesFormat
from swiftspec_jax.server.responses_schema import ResponsesRequest
from swiftspec_jax.server.service import Call, Service

_T = TypeVar('_T')

_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the number is nginx's
_ERRORS = {
  '4XX': {'model': answer_types.ErrorAnswer},
  '5XX': {'model': answer_types.ErrorAnswer},
}
_STREAM = {200: {'content': {'text/event-stream': {'schema': {}}}}}

_router = fastapi.APIRouter()


def make_app(
  service: Service,
  *,
  api_keys: Sequence[str] = (),
  max_body_bytes: int = 4 * 2**20,
  allowed_origins: Sequence[str] = (),
) -> fastapi.FastAPI:
  """Returns the application that serves a service.

  Args:
    service: engine and its limits.
    api_keys: keys, one of which every request to /v1 must have; () asks for
      none.
    max_body_bytes: most bytes of a request's body.
    allowed_origins: origins of other pages that browsers may let ask, such as
      https://example.com; * is any.
  """
  app = fastapi.FastAPI(
    title='swiftspec_jax',
    version=ss.__version__,
    exception_handlers=refusals.HANDLERS,
  )
  app.state.service = service
  app.add_middleware(Guard, api_keys=api_keys, max_body_bytes=max_body_bytes)
  if allowed_origins:
    app.add_middleware(
      CORSMiddleware,
      allow_origins=allowed_origins,
      allow_methods=['GET', 'POST'],
      allow_headers=['*'],
      expose_headers=[request_log.ID_HEADER, 'Retry-After'],
    )
  app.add_middleware(request_log.RequestLog)
  for router in (_router, status.router, tokens.router, page_endpoint.router):
    app.include_router(router, responses=_ERRORS)
  return app


@_router.post(
  '/v1/completions', response_model=answer_types.Completion, responses=_STREAM
)
async def completions(body: schema.CompletionRequest, http: fastapi.Request):
  """Continues texts, or fills in between two."""
  service = http.app.state.service
  prompts = body.prompts
  if body.suffix:
    prompts = [
      fill_in.prompt_of(service.model.tokenizer, prompt, body.suffix)
      for prompt in prompts
    ]
  requests = await _requests(
    service, body, prompts, add_special_tokens=body.add_special_tokens
  )
  return await _decode(http, body, requests, CompletionFormat)


@_router.post(
  '/v1/chat/completions',
  response_model=answer_types.ChatCompletion,
  responses=_STREAM,
)
async def chat_completions(body: schema.ChatRequest, http: fastapi.Request):
  """Answers a conversation."""
  return await _chat(http, body, ChatFormat)


@_router.post('/v1/responses', responses=_STREAM)
async def responses_(body: ResponsesRequest, http: fastapi.Request):
  """Answers a conversation in the words of another interface."""
  make_format = functools.partial(ResponsesFormat, told_again=body.told_again())
  return await _chat(http, body.to_chat(), make_format)


async def _chat(
  http: fastapi.Request,
  body: schema.ChatRequest,
  make_format: Callable[..., ChatFormat],
) -> Any:
  service = http.app.state.service
  messages = [message.to_template() for message in body.messages]
  requests = await _requests(
    service,
    body,
    [messages],
    template_options=body.template_options,
    changes=tool_choice.sampling_of(
      service.call_format, service.model.tokenizer, body
    ),
  )
  return await _decode(http, body, requests, make_format)


async def _requests(
  service: Service,
  body: schema.Body,
  prompts: Sequence[prompt_lib.Prompt],
  *,
  changes: Mapping[str, Any] | None = None,
  **encoding: Any,
) -> list[ss.Request]:
  """Returns the requests of a call: prompts times n.

  Args:
    service: engine and its limits.
    body: fields of the call.
    prompts: prompts of the call.
    changes: fields of the sampling in place of those of the body.
    **encoding: options of `PromptEncoder.encode`.
  """
  service.check_model(body.model)
  samplings = [
    dataclasses.replace(sampling, **changes or {})
    for sampling in body.samplings()
  ]
  service.check_number(len(prompts) * len(samplings))
  if samplings[0].structured_outputs is not None:
    # A large grammar compiles for half a second; the engine then finds it.
    await asyncio.to_thread(
      grammar.start, samplings[0].structured_outputs, service.model
    )
  return [
    ss.Request(token_ids=token_ids, sampling=sampling)
    for token_ids in await service.encoder.encode(prompts, **encoding)
    for sampling in samplings
  ]


async def _decode(
  http: fastapi.Request,
  body: schema.Body,
  requests: Sequence[ss.Request],
  make_format: Callable[..., answers.Format],
) -> Any:
  """Decodes requests; answers at once or in parts."""
  service = http.app.state.service
  answer = make_format(service, body, requests)
  call = service.open(requests, body)
  http.state.call = call
  if body.stream:
    include_usage = body.stream_options.include_usage
    return _EventStream(call, _events(call, answer, include_usage))
  with contextlib.closing(call):
    whole = await _unless_gone(_whole(call, answer), http)
  return whole or fastapi.Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _whole(call: Call, answer: answers.Format) -> dict[str, Any]:
  answer.rate(await call.ratings())
  return answer.whole(await call.results())


async def _events(
  call: Call, answer: answers.Format, include_usage: bool
) -> AsyncIterator[str]:
  """Yields server-sent events."""
  try:
    answer.rate(await call.ratings())
    for event in answer.opening(len(call.handles)):
      yield answer.encode(event)
    async for index, update in call.updates():
      for event in answer.news(index, update):
        yield answer.encode(event)
  except handles.EngineError as error:
    failure = refusals.body(500, refusals.message_of(error))
    yield answer.encode(failure)
    return
  if include_usage:
    yield answer.encode(answer.closing())
  yield answer.ending


class _EventStream(responses.StreamingResponse):
  """Server-sent events of a call, which ends with them."""

  media_type = 'text/event-stream'

  def __init__(self, call: Call, events: AsyncIterator[str]):
    super().__init__(events, headers={'Cache-Control': 'no-cache'})
    self._call = call

  async def __call__(self, scope, receive, send) -> None:
    with contextlib.closing(self._call):
      await super().__call__(scope, receive, send)


async def _unless_gone(
  work: Coroutine[Any, Any, _T], http: fastapi.Request
) -> _T | None:
  """Returns the outcome of `work`, None if the client goes before that."""
  tasks = [
    asyncio.ensure_future(work),
    asyncio.ensure_future(_wait_until_gone(http)),
  ]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return tasks[0].result() if tasks[0].done() else None
  finally:
    for task in tasks:
      task.cancel()


async def _wait_until_gone(http: fastapi.Request) -> None:
  while (await http.receive())['type'] != 'http.disconnect':
    pass
