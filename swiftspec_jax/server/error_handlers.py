"""Answers to requests that fail."""

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from swiftspec_jax import errors
from swiftspec_jax.engine import handles
from swiftspec_jax.server import refusals


async def _on_refusal(
  http: fastapi.Request, error: HTTPException
) -> fastapi.Response:
  if http.method == 'OPTIONS' and error.status_code == 405:
    return fastapi.Response(status_code=204, headers=error.headers)
  return refusals.answer(error.status_code, error.detail, headers=error.headers)


async def _on_user_error(_, error: errors.UserError) -> fastapi.Response:
  return refusals.answer(400, str(error))


async def _on_failure(_, error: Exception) -> fastapi.Response:
  return refusals.answer(500, message_of(error))


def message_of(error: Exception) -> str:
  """Returns what clients learn of a failure."""
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


HANDLERS = {
  HTTPException: _on_refusal,
  RequestValidationError: _on_invalid,
  errors.UserError: _on_user_error,
  handles.EngineError: _on_failure,
  Exception: _on_failure,
}
