"""What a request must show before the server reads it."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftspec_jax.server import refusals

# As in vLLM: probes and Prometheus have no keys.
_GUARDED = ('/v1', '/tokenize', '/detokenize')


class Guard:
  """Refuses requests without a key, and bodies that are too large.

  A body is refused by the length that its header names, or, where it comes in
  chunks, when more than the limit has come.
  """

  def __init__(
    self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int
  ):
    """Keeps digests of the keys alone.

    Args:
      app: application that is guarded.
      api_keys: keys, one of which a request must have; () asks for none.
      max_body_bytes: most bytes of a body.
    """
    self._app = app
    self._digests = [_digest(key.encode()) for key in api_keys]
    self._max_body_bytes = max_body_bytes

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    headers = Headers(scope=scope)
    refusal = None
    if scope['path'].startswith(_GUARDED) and not self._has_key(headers):
      refusal = refusals.answer(
        401,
        'this server needs an API key: Authorization: Bearer KEY',
        code='invalid_api_key',
        headers={'WWW-Authenticate': 'Bearer'},
      )
    elif int(headers.get('Content-Length', 0)) > self._max_body_bytes:
      refusal = refusals.answer(413, self._too_large())
    if refusal is not None:
      await refusal(scope, receive, send)
      return
    await self._app(scope, self._limited(receive), send)

  def _has_key(self, headers: Headers) -> bool:
    if not self._digests:
      return True
    kind, _, key = headers.get('Authorization', '').partition(' ')
    # The bytes as they came; digests have one length, whatever the keys have.
    found = _digest(key.strip().encode('latin-1'))
    is_known = False
    for digest in self._digests:
      is_known |= hmac.compare_digest(digest, found)
    return is_known and kind.lower() == 'bearer'

  def _limited(self, receive: Receive) -> Receive:
    """Returns `receive` for bodies up to the limit."""
    num_bytes = 0

    async def receive_limited() -> Message:
      nonlocal num_bytes
      message = await receive()
      num_bytes += len(message.get('body', b''))
      if num_bytes > self._max_body_bytes:
        raise HTTPException(413, self._too_large())
      return message

    return receive_limited

  def _too_large(self) -> str:
    return f'the body has more than {self._max_body_bytes} bytes'


def _digest(key: bytes) -> bytes:
  return hashlib.sha256(key).digest()
