"""Errors as OpenAI's clients expect them."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

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
) -> Response:
  """Returns the answer to a request that is not served.

  Args:
    status: HTTP status.
    message: reason, for people.
    headers: headers besides the usual ones.
    **fields: `param` and `code` of `body`.
  """
  return Response(
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
