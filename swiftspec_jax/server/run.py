"""Runs a server until it is told to stop."""

import socket
import time
from types import FrameType
from typing import Any

import uvicorn

from swiftspec_jax.engine import background
from swiftspec_jax.server.app import make_app
from swiftspec_jax.server.service import Service

# Clients drop idle connections after about 5 seconds. If the server did so,
# too, a request could meet a connection that is being closed.
_KEEP_ALIVE = 30  # seconds
_SECONDS_TO_ANSWER, _SECONDS_TO_SEND = 2.0, 0.1


class Server(uvicorn.Server):
  """Ends, at the first signal, when all calls have been answered.

  Until then it refuses further ones with status 503. A second signal ends it
  at once.
  """

  def __init__(self, service: Service, **options: Any):
    """Opens no port yet; the arguments are those of `make_app`."""
    super().__init__(
      uvicorn.Config(
        make_app(service, **options),
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE,
      )
    )
    self._service = service

  def serve_on(self, listener: socket.socket) -> None:
    """Serves until the end.

    Args:
      listener: a socket that is bound to its address.
    """
    service = self._service
    with background.running(service.engine, service.metrics.note_step):
      self.run(sockets=[listener])

  def stop(self) -> None:
    """Ends when all calls have been answered."""
    self._service.engine.programs.stop()
    self._service.drain(self._exit)

  def give_up(self, reason: str) -> None:
    """Has all calls answered with an error, and waits for that a moment.

    For the thread that learns that another process of the engine has ended.
    """
    self._service.engine.fail(RuntimeError(reason))
    deadline = time.monotonic() + _SECONDS_TO_ANSWER
    while self._service.num_open and time.monotonic() < deadline:
      time.sleep(_SECONDS_TO_SEND)
    time.sleep(_SECONDS_TO_SEND)

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """Takes a signal; not as uvicorn, which would raise it again at the end."""
    del sig, frame
    if self._service.is_draining:
      self.force_exit = True
      self._exit()
    else:
      self.stop()

  def _exit(self) -> None:
    self.should_exit = True
