"""Errors as OpenAI's clients expect them."""

import json
from collections.abc import Mapping
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from swiftspec_jax import errors
from swiftspec_jax.engine import handles

_TYPES = {
  401: 'authentication_error',
  404: 'not_found_error',
  429: 'rate_limit_error',
  503: 'service_unavailable_error',
}


def answer(
  status: int,
  message: str,
  *,
  headers: Mapping[str, str] | None = None,
  **fields: str | None,
) -> fastapi.Response:
  """Returns the answer to a request that is not served.

  Args:
    status: HTTP status.
    message: reason, for people.
    headers: headers besides the usual ones.
    **fields: `param` and `code` of `body`.
  """
  return fastapi.Response(
    # Not JSONResponse: what is quoted need not be valid Unicode.
    json.dumps(body(status, message, **fields)),
    status,
    headers,
    'application/json',
  )


def body(
  status: int,
  message: str,
  *,
  param: str | None = None,
  code: str | None = None,
) -> dict[str, Any]:
  """Returns what the answer says.

  Args:
    status: HTTP status.
    message: reason, for people.
    param: field that was wrong.
    code: reason, for programs.
  """
  default = 'invalid_request_error' if status < 500 else 'server_error'
  return {
    'error': {
      'message': message,
      'type': _TYPES.get(status, default),
      'param': param,
      'code': code,
    }
  }


async def _on_refusal(
  http: fastapi.Request, error: HTTPException
) -> fastapi.Response:
  if http.method == 'OPTIONS' and error.status_code == 405:
    return fastapi.Response(status_code=204, headers=error.headers)
  return answer(error.status_code, error.detail, headers=error.headers)


async def _on_user_error(_, error: errors.UserError) -> fastapi.Response:
  return answer(400, str(error))


async def _on_failure(_, error: Exception) -> fastapi.Response:
  return answer(500, message_of(error))


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
  return answer(400, message, param=where or None)


HANDLERS = {
  HTTPException: _on_refusal,
  RequestValidationError: _on_invalid,
  errors.UserError: _on_user_error,
  handles.EngineError: _on_failure,
  Exception: _on_failure,
}
