"""The endpoints."""

import asyncio
import functools
import importlib.resources
import json
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import fastapi
import prometheus_client
from fastapi import responses
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import swiftspec_jax as ss
from swiftspec_jax import errors, grammar
from swiftspec_jax.engine import handles
from swiftspec_jax.server import answer_types, answers, refusals, schema
from swiftspec_jax.server import echo as echo_lib
from swiftspec_jax.server import prompts as prompt_lib
from swiftspec_jax.server.guard import Guard
from swiftspec_jax.server.service import Call, Service

_T = TypeVar('_T')

MAX_BODY_BYTES = 4 * 2**20
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the number is nginx's
_ERRORS = {
  '4XX': {'model': answer_types.ErrorAnswer},
  '5XX': {'model': answer_types.ErrorAnswer},
}
_STREAM = {200: {'content': {'text/event-stream': {'schema': {}}}}}

_PAGE_FILES = importlib.resources.files(__package__).joinpath('page')
# The page asks this server alone, and shows what a model says as text.
_PAGE_HEADERS = {
  'Content-Security-Policy': (
    "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
  ),
  'Referrer-Policy': 'no-referrer',
  'X-Content-Type-Options': 'nosniff',
}

_router = fastapi.APIRouter(responses=_ERRORS)


def make_app(
  service: Service,
  *,
  api_keys: Sequence[str] = (),
  max_body_bytes: int = MAX_BODY_BYTES,
) -> fastapi.FastAPI:
  """Returns the application that serves a service.

  Args:
    service: engine and its limits.
    api_keys: keys, one of which every request to /v1 must have; () asks for
      none.
    max_body_bytes: most bytes of a request's body.
  """
  app = fastapi.FastAPI(
    title='swiftspec_jax',
    version=ss.__version__,
    exception_handlers={
      HTTPException: _on_refusal,
      RequestValidationError: _on_invalid,
      errors.UserError: _on_user_error,
      handles.EngineError: _on_failure,
      Exception: _on_failure,
    },
  )
  app.state.service = service
  app.add_middleware(Guard, api_keys=api_keys, max_body_bytes=max_body_bytes)
  app.include_router(_router)
  return app


@_router.get(
  '/', response_class=responses.HTMLResponse, include_in_schema=False
)
async def page():
  """Returns a page to chat with the model."""
  return responses.HTMLResponse(_whole_page(), headers=_PAGE_HEADERS)


@functools.cache
def _whole_page() -> str:
  """Returns the page with what it links to inside of it: one answer."""
  text = _PAGE_FILES.joinpath('page.html').read_text()
  for pattern, tag in (
    (r'<link rel="stylesheet" href="(.*)">', 'style'),
    (r'<script src="(.*)"></script>', 'script'),
  ):
    for link in re.finditer(pattern, text):
      own = _PAGE_FILES.joinpath(link[1]).read_text()
      text = text.replace(link[0], f'<{tag}>\n{own}</{tag}>')
  return text


@_router.post(
  '/v1/completions', response_model=answer_types.Completion, responses=_STREAM
)
async def completions(body: schema.CompletionRequest, http: fastapi.Request):
  """Continues texts."""
  return await _answer(http, body, body.prompts, answers.CompletionFormat)


@_router.post(
  '/v1/chat/completions',
  response_model=answer_types.ChatCompletion,
  responses=_STREAM,
)
async def chat_completions(body: schema.ChatRequest, http: fastapi.Request):
  """Answers a conversation."""
  vision = http.app.state.service.model.config.vision
  messages = [
    message.to_template(reads_images=vision is not None)
    for message in body.messages
  ]
  urls = [url for message in body.messages for url in message.image_urls]
  return await _answer(http, body, [messages], answers.ChatFormat, urls)


@_router.get('/v1/models', response_model=answer_types.Models)
async def models(http: fastapi.Request):
  """Lists the one model."""
  return {'object': 'list', 'data': [_describe(http.app.state.service)]}


@_router.get('/v1/models/{model:path}', response_model=answer_types.Model)
async def model(model: str, http: fastapi.Request):
  """Describes the model."""
  _check_model(model, http.app.state.service)
  return _describe(http.app.state.service)


@_router.get('/health', response_model=answer_types.Health)
async def health(http: fastapi.Request):
  """Says whether requests can be served."""
  service = http.app.state.service
  if service.is_draining:
    raise HTTPException(503, 'the server is shutting down')
  programs = service.engine.programs
  error = service.engine.error or programs.error
  if error is not None:
    raise HTTPException(503, f'the engine has failed: {error!r}; see the log')
  return {
    'status': 'warming up' if programs.is_warming_up else 'ok',
    'num_programs': programs.num_programs,
    'num_compiled_programs': programs.num_compiled,
  }


@_router.get('/metrics', response_class=responses.PlainTextResponse)
async def metrics(http: fastapi.Request):
  """Returns figures for Prometheus."""
  return fastapi.Response(
    prometheus_client.generate_latest(http.app.state.service.metrics.registry),
    media_type=prometheus_client.CONTENT_TYPE_LATEST,
  )


async def _answer(
  http: fastapi.Request,
  body: schema.CompletionRequest | schema.ChatRequest,
  prompts: Sequence[prompt_lib.Prompt],
  make_format: type[answers.Format],
  image_urls: Sequence[str] = (),
) -> Any:
  """Decodes prompts with the same images; answers at once or in parts."""
  service = http.app.state.service
  _check_model(body.model, service)
  samplings = body.samplings()
  service.check_number(len(prompts) * len(samplings))
  if samplings[0].structured_outputs is not None:
    # A large grammar compiles for half a second; the engine then finds it.
    await asyncio.to_thread(
      grammar.start, samplings[0].structured_outputs, service.model
    )
  images = await service.encoder.read(image_urls)
  requests = [
    ss.Request(
      token_ids=token_ids,
      sampling=sampling,
      slo_tpot=body.slo_tpot,
      images=images,
    )
    for token_ids in await service.encoder.encode(prompts)
    for sampling in samplings
  ]
  answer = make_format(
    service.name,
    service.model.tokenizer,
    body.n,
    body.include_speculation,
    body.include_draft_nodes,
  )
  if body.echo:
    answer.start_with(
      echo_lib.echo_of(
        service.model.tokenizer,
        prompt,
        request.token_ids,
        body.num_top_logprobs,
        skip_special_tokens=body.skip_special_tokens,
      )
      for prompt, request in zip(prompts, requests[:: body.n], strict=True)
    )
  call = service.open(
    requests,
    body.max_speculative_tokens,
    shows_drafts=body.include_draft_nodes,
    scored=requests[:: body.n] if body.scores_prompts else (),
    only_scores=body.max_new_tokens == 0,
  )
  if body.stream:
    return _EventStream(call, _events(call, answer, body.include_usage))
  with call:
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
      yield _encode(event)
    async for index, update in call.updates():
      event = answer.news(index, update)
      if event is not None:
        yield _encode(event)
  except handles.EngineError as error:
    yield _encode(refusals.body(500, _failure(error)))
    return
  if include_usage:
    yield _encode(answer.closing([handle.result() for handle in call.handles]))
  yield 'data: [DONE]\n\n'


def _encode(event: dict[str, Any]) -> str:
  return f'data: {json.dumps(event)}\n\n'


class _EventStream(responses.StreamingResponse):
  """Server-sent events of a call, which ends with them."""

  media_type = 'text/event-stream'

  def __init__(self, call: Call, events: AsyncIterator[str]):
    super().__init__(events, headers={'Cache-Control': 'no-cache'})
    self._call = call

  async def __call__(self, scope, receive, send) -> None:
    with self._call:
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


def _check_model(name: str, service: Service) -> None:
  if name != service.name:
    raise HTTPException(
      404, f'there is no model {name!r}; this server has {service.name!r}'
    )


def _describe(service: Service) -> answer_types.Model:
  return {
    'id': service.name,
    'object': 'model',
    'created': service.created,
    'owned_by': 'swiftspec_jax',
    'max_model_len': service.engine.max_context,
    'speculation': {'max_tokens': service.engine.max_draft_tokens},
  }


async def _on_refusal(_, error: HTTPException) -> fastapi.Response:
  return refusals.answer(error.status_code, error.detail, headers=error.headers)


async def _on_user_error(_, error: errors.UserError) -> fastapi.Response:
  return refusals.answer(400, str(error))


async def _on_failure(_, error: Exception) -> fastapi.Response:
  return refusals.answer(500, _failure(error))


def _failure(error: Exception) -> str:
  return f'{error}; see the log'


async def _on_invalid(_, error: RequestValidationError) -> fastapi.Response:
  # Of the kinds that a field can have, the one that fits best.
  found = max(error.errors(), key=lambda e: len(e['loc']))
  # Without 'body' and the names of kinds.
  parts = [str(part) for part in found['loc'][1:]]
  where = '.'.join(part for part in parts if part.isalnum() or '_' in part)
  message = found['msg']
  if found['type'] == 'json_invalid':
    where, message = '', f'the body is not JSON: {found["ctx"]["error"]}'
  elif found['type'] == 'model_attributes_type' and not where:
    message = 'send a JSON object, with Content-Type: application/json'
  elif found['type'] == 'extra_forbidden':
    message = 'not supported by this server; leave it out'
  elif found['type'] == 'value_error':
    message = str(found['ctx']['error'])
  message = f'{where}: {message}' if where else message
  return refusals.answer(400, message, param=where or None)
