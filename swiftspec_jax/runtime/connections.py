"""Connections of process 0 with each other process.

They carry lines of JSON: what must be the same, values that all need, and the
news that a process ends.
"""

import contextlib
import dataclasses
import errno
import json
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from swiftspec_jax import errors

_SECONDS_TO_SAY_HELLO = 5
# A host that vanishes says nothing: so it is asked.
_KEEPALIVE = (('KEEPIDLE', 10), ('KEEPINTVL', 5), ('KEEPCNT', 4))
# Linux gives those from 32768 on, other systems those from 49152 on.
_PORTS = range(20_000, 32_768)
_random = random.SystemRandom()  # differs between processes with one seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Place of this process among all.

  Attributes:
    address: host and port where process 0 waits for the others.
    num_processes: number of processes.
    process_id: number of this one.
  """

  address: str
  num_processes: int
  process_id: int


class FirstHasLeftError(Exception):
  """Process 0 has done its work, and sends nothing any more."""


class Connections:
  """The connections of process 0 with the others, or of another with it.

  Attributes:
    own_host: address of this host, as others reach it.
    num_processes: number of processes, this one included.
  """

  def __init__(self, place: Place, on_end: Callable[[str], NoReturn]):
    """Connects nothing yet; the arguments are those of `hosts.join`."""
    self.own_host = '127.0.0.1'
    self.num_processes = place.num_processes
    self._place = place
    self._on_end = on_end
    # Of each other process that this one is connected with.
    self._sockets: dict[int, socket.socket] = {}
    self._inboxes: dict[int, queue.SimpleQueue] = {}
    self._of_first: queue.SimpleQueue = queue.SimpleQueue()
    self._threads: list[threading.Thread] = []
    self._failure = threading.Lock()  # held for ever by who reports one
    self._is_sending = threading.Lock()

  def meet(self, facts: Mapping[str, Any], deadline: float) -> int:
    """Connects all; returns a port of process 0 for JAX's own service.

    Args:
      facts: JSON values by name that all must share.
      deadline: latest time of `time.monotonic`.

    Raises:
      UserError: not all are there in time, or their facts differ.
    """
    facts = json.loads(json.dumps(dict(facts)))
    try:
      if self._place.process_id:
        port = self._meet_first(facts, deadline)
      else:
        port = self._meet_others(facts, deadline)
    except errors.UserError:
      self.close()
      raise
    for process_id, connection in self._sockets.items():
      self._inboxes[process_id] = queue.SimpleQueue()
      thread = threading.Thread(
        target=self._listen, args=(process_id, connection), daemon=True
      )
      thread.start()
      self._threads.append(thread)
    return port

  def _meet_first(self, facts, deadline) -> int:
    place = self._place
    host, _, port = place.address.rpartition(':')
    while True:
      try:
        connection = socket.create_connection((host.strip('[]'), int(port)), 2)
        break
      except OSError as error:
        if time.monotonic() > deadline:
          raise errors.UserError(
            f'process 0 does not answer at --coordinator_address='
            f'{place.address} ({error}); is it running there, and is the port '
            'open?'
          ) from error
        time.sleep(0.1)
    self.own_host = _as_host(connection.getsockname()[0])
    connection.settimeout(
      max(deadline - time.monotonic(), 1) + _SECONDS_TO_SAY_HELLO
    )
    _keep_alive(connection)
    self._sockets[0] = connection
    self._send(0, {'process_id': place.process_id, 'facts': facts})
    try:
      answer = _read_line(connection)
    except (OSError, ValueError) as error:
      raise errors.UserError(
        f'process 0 at {place.address} has ended before all were there'
      ) from error
    if 'error' in answer:
      raise errors.UserError(answer['error'])
    connection.settimeout(None)
    return answer['port']

  def _meet_others(self, facts, deadline) -> int:
    place = self._place
    port = int(place.address.rpartition(':')[2])
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
      server = socket.create_server(
        ('', port),
        family=family,
        dualstack_ipv6=family == socket.AF_INET6,
      )
    except OSError as error:
      raise errors.UserError(
        f'--coordinator_address={place.address}: {error}; name this host and '
        'a free port'
      ) from error
    refusal = None
    with server:
      while len(self._sockets) < place.num_processes - 1:
        server.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
          connection, _ = server.accept()
        except TimeoutError:
          break
        # Also of those that come after a refusal, so that they hear it.
        found = self._admit(connection, facts)
        refusal = refusal or found
        if refusal is not None:
          deadline = min(deadline, time.monotonic() + _SECONDS_TO_SAY_HELLO)
    missing = {*range(1, place.num_processes)} - self._sockets.keys()
    if missing and refusal is None:
      refusal = (
        f'of --num_processes={place.num_processes} these have not come: '
        f'{", ".join(map(str, sorted(missing)))}'
      )
    if refusal is not None:
      self._send_all({'error': refusal})
      raise errors.UserError(refusal)
    port = free_port()
    self._send_all({'port': port})
    return port

  def _admit(self, connection: socket.socket, facts) -> str | None:
    """Takes a process that has connected; returns why not, if so."""
    connection.settimeout(_SECONDS_TO_SAY_HELLO)
    try:
      hello = _read_line(connection)
      process_id, report = int(hello['process_id']), dict(hello['facts'])
    except (OSError, ValueError, KeyError, TypeError):
      connection.close()  # none of ours
      return None
    connection.settimeout(None)
    _keep_alive(connection)
    self.own_host = _as_host(connection.getsockname()[0])
    is_new = process_id not in self._sockets
    # A place of its own, so that it hears the refusal.
    self._sockets[process_id if is_new else -len(self._sockets)] = connection
    if difference := find_difference(facts, report, process_id):
      return difference
    if not is_new:
      return f'two processes have --process_id={process_id}; each needs its own'
    return None

  def exchange(self, value: Any) -> list[Any]:
    """Returns the values of all processes, in the order of their ids."""
    if self._place.process_id:
      self._send(0, {'value': value})
      return self._inboxes[0].get()['values']
    # As the others will have it.
    values = [json.loads(json.dumps(value))] + [
      self._inboxes[process_id].get()['value']
      for process_id in range(1, self._place.num_processes)
    ]
    self._send_all({'values': values})
    return values

  def from_process_zero(self, make: Callable[[], Any]) -> Any:
    """Does what `hosts.from_process_zero` says."""
    if not self._place.process_id:
      value = make()
      self._send_all({'from_process_zero': value})
      return value
    message = self._of_first.get()
    if 'end' in message:
      self._of_first.put(message)  # for those that ask again
      raise FirstHasLeftError
    return message['from_process_zero']

  def leave(self, error: str | None) -> None:
    """Tells the others that this process ends; None if its work is done."""
    if error is not None:
      self._failure.acquire()  # `_listen` may be about to end this process
      error = f'process {self._place.process_id}: {error}'
    self._send_all({'end': error})

  def close(self) -> None:
    """Closes all; nobody must be using them any more."""
    for connection in self._sockets.values():
      connection.close()

  def wait_for_others(self, timeout: float) -> None:
    """Has process 0 wait for the others' ends, at most `timeout` seconds."""
    if self._place.process_id:
      return
    deadline = time.monotonic() + timeout
    for thread in self._threads:
      thread.join(max(deadline - time.monotonic(), 0))

  def _listen(self, process_id: int, connection: socket.socket) -> None:
    """Takes messages of a process until it ends."""
    is_done = False
    try:
      with connection.makefile(encoding='utf-8') as lines:
        for line in lines:
          message = json.loads(line)
          if message.get('end') is not None:
            is_done = True
            self._fail(message['end'])
          elif 'end' in message:
            is_done = True
            self._of_first.put(message)
          elif 'from_process_zero' in message:
            self._of_first.put(message)
          else:
            self._inboxes[process_id].put(message)
    except (OSError, ValueError):
      pass  # broken off
    if not is_done:
      self._fail(f'process {process_id} has ended; its own messages say why')

  def _fail(self, reason: str) -> None:
    """Tells the others and ends this process, unless that has begun."""
    if self._failure.acquire(blocking=False):
      self._send_all({'end': reason})
      threading.Thread(target=self._on_end, args=(reason,), daemon=True).start()

  def _send_all(self, message: Mapping[str, Any]) -> None:
    for process_id in self._sockets:
      self._send(process_id, message)

  def _send(self, process_id: int, message: Mapping[str, Any]) -> None:
    line = f'{json.dumps(message)}\n'.encode()
    with self._is_sending, contextlib.suppress(OSError):  # `_listen` notices
      self._sockets[process_id].sendall(line)


def find_difference(
  first: Mapping[str, Any], other: Mapping[str, Any], process_id: int
) -> str | None:
  """Returns what differs between process 0 and another one, None if nothing."""
  for name in sorted(first.keys() | other.keys()):
    if first.get(name) != other.get(name):
      return (
        f'{name} differs: {first.get(name)!r} in process 0, '
        f'{other.get(name)!r} in process {process_id}; all processes need the '
        'same flags, versions and files'
      )
  return None


def _read_line(connection: socket.socket) -> Any:
  """Returns the JSON value of the first line, and takes no byte after it."""
  line = b''
  while not line.endswith(b'\n'):
    if not (byte := connection.recv(1)):
      raise ConnectionError('the connection was closed')
    line += byte
  return json.loads(line)


def _keep_alive(connection: socket.socket) -> None:
  """Has the system ask now and then whether the other host still answers."""
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in _KEEPALIVE:
    if option := getattr(socket, f'TCP_{name}', None):  # not on every system
      connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _as_host(address: str) -> str:
  # An IPv4 address on a socket for both kinds.
  address = address.removeprefix('::ffff:')
  return f'[{address}]' if ':' in address else address


def free_port() -> int:
  """Returns a port that was free just now.

  Whoever asks may take seconds until it listens there, so it is none of those
  that systems give to outgoing connections.
  """
  while True:
    port = _random.choice(_PORTS)
    try:
      with socket.create_server(('', port)):
        return port
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
