"""An id and a line in the log for each request."""

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ID_HEADER = 'X-Request-Id'
_MAX_ID_LENGTH = 128
_LOG = logging.getLogger(__name__)


class RequestLog:
  """Gives answers the id of their request; logs those that decode, and errors.

  The id is the client's, if it sends one.
  """

  def __init__(self, app: ASGIApp):
    self._app = app

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    request_id = Headers(scope=scope).get(ID_HEADER, uuid.uuid4().hex)
    request_id = request_id[:_MAX_ID_LENGTH]
    # Servers leave out the body of the answer to HEAD.
    method = 'GET' if scope['method'] == 'HEAD' else scope['method']
    state = scope.setdefault('state', {})
    status = None

    async def send_with_id(message: Message) -> None:
      nonlocal status
      if message['type'] == 'http.response.start':
        status = message['status']
        MutableHeaders(scope=message)[ID_HEADER] = request_id
      await send(message)

    start = time.perf_counter()
    try:
      await self._app({**scope, 'method': method}, receive, send_with_id)
    finally:
      if 'call' in state or status != 200:
        _LOG.info(
          '%s %s: %s in %.3f s%s',
          request_id,
          scope['path'],
          status,
          time.perf_counter() - start,
          f', {state["call"].summary}' if 'call' in state else '',
        )
