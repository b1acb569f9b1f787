r"""An HTTP server with OpenAI's interface.

  swiftspec serve --port=8000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "smollm2-135m-instruct", "prompt": "The sea is"}'

Compiles what the first requests need, opens the port, and compiles the rest in
the background; with --warm_up=full it compiles everything first. Ctrl-C or
SIGTERM end it when what runs is done; a second one at once. Needs the extra
`serve`. docs/start/serve.md has more.
"""

import importlib
import logging
import os
import signal
import socket
from collections.abc import Sequence

from absl import flags
from absl import logging as absl_logging

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.cli import extras, program
from swiftspec_jax.cli.flags import (
  config_file,
  cost_flags,
  device_flags,
  draft_flags,
  engine_flags,
  host_flags,
  policy_names,
  shared_flags,
)
from swiftspec_jax.engine import background
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.from_process_zero import FromProcessZero
from swiftspec_jax.runtime import hosts, sharding
from swiftspec_jax.step.program_sizes import ProgramSizes

_PATIENCE = 5.0  # seconds, at the end, for what is being compiled
_API_KEY_VARIABLE = 'SWIFTSPEC_API_KEY'

_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
_PORT = flags.DEFINE_integer(
  'port', 8000, '0 takes a free one.', lower_bound=0, upper_bound=65535
)
_POLICY = flags.DEFINE_string(
  'policy', 'goodput', f'How much to speculate: {policy_names.HELP}'
)
_MAX_WAITING = flags.DEFINE_integer(
  'max_waiting',
  128,
  'Most requests that wait for a slot; further ones are refused.',
  lower_bound=0,
)
_SERVED_MODEL_NAME = flags.DEFINE_string(
  'served_model_name', None, 'Name of the model for clients. Default: --target.'
)
_WARM_UP = flags.DEFINE_enum(
  'warm_up',
  'background',
  ['background', 'full'],
  'When programs are compiled: those that the first requests need before the '
  'port opens and the others in the background, or all of them before.',
)
_API_KEY = flags.DEFINE_multi_string(
  'api_key',
  None,
  'Key that requests to /v1 must have, as `Authorization: Bearer KEY`; may be '
  'given several times. Default: that of the environment variable '
  f'{_API_KEY_VARIABLE}, which other users of the machine cannot read; without '
  'either, none is asked for.',
)
_MAX_BODY_BYTES = flags.DEFINE_integer(
  'max_body_bytes',
  4 * 2**20,
  "Most bytes of a request's body; larger ones are refused.",
  lower_bound=1,
)
_ALLOWED_ORIGINS = flags.DEFINE_list(
  'allowed_origins',
  [],
  'Origins of pages that browsers let ask this server, such as '
  'https://example.com, besides its own page; * is any.',
)
_TOOL_CALL_PARSER = flags.DEFINE_enum(
  'tool_call_parser',
  None,
  ['hermes', 'llama3_json', 'mistral'],
  'How the model writes calls of tools. Default: as its chat template shows.',
)
flags.FLAGS.set_default('share_prefixes', True)


def main() -> None:
  """Runs the program."""
  remedy = f'; the server needs: {extras.how_to_install("serve")}'
  with errors.explained('', ImportError, remedy):
    importlib.import_module('swiftspec_jax.server.run')
  for name in shared_flags.SAMPLING:
    if flags.FLAGS[name].present:
      raise errors.UserError(
        f'--{name} has no effect on a server: its clients say what they want'
      )
  config_file.apply()
  host_flags.initialize(_API_KEY.name)
  device_flags.spread([engine_flags.mode()])
  api_keys = _api_keys()
  declared = engine_flags.sizes()
  cost_flags.check([_POLICY.value])
  listener = None
  if sharding.is_first_process():
    listener = _bind()  # it is found out early, as loading takes long
  engine, target = _make(declared)
  if _WARM_UP.value == 'full':
    engine.programs.compile_all(show_progress='compiling')
  else:
    engine.programs.start(is_idle=lambda: not engine.num_requests)
  if listener is None:
    _follow(engine)
  else:
    _serve(engine, target, listener, api_keys)
  hosts.leave()
  hosts.wait_for_others()
  if not engine.programs.join(_PATIENCE) or hosts.is_together():
    program.leave()


def _serve(
  engine: Engine,
  target: ss.Model,
  listener: socket.socket,
  api_keys: Sequence[str],
) -> None:
  """Answers requests until a signal comes."""
  from swiftspec_jax.server import run
  from swiftspec_jax.server.service import Service

  if flags.FLAGS.verbosity >= absl_logging.WARNING:  # the default
    logging.getLogger(run.__package__).setLevel(logging.INFO)
  service = Service(
    engine,
    target,
    name=_SERVED_MODEL_NAME.value,
    max_waiting=_MAX_WAITING.value,
    tool_call_parser=_TOOL_CALL_PARSER.value,
  )
  server = run.Server(
    service,
    api_keys=api_keys,
    max_body_bytes=_MAX_BODY_BYTES.value,
    allowed_origins=_ALLOWED_ORIGINS.value,
  )
  host_flags.before_end(server.give_up)
  host, port = listener.getsockname()[:2]
  listener.listen()  # whoever reads the next line may connect
  print(f'{service.name} at http://{host}:{port}/v1', flush=True)
  server.serve_on(listener)


def _follow(engine: Engine) -> None:
  """Works for process 0 until that ends, whatever signal comes first."""

  def ignore_once(number: int, _) -> None:
    signal.signal(number, signal.SIG_DFL)

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, ignore_once)
  background.follow(engine)
  engine.programs.stop()


def _api_keys() -> list[str]:
  """Returns the keys; never shown, in messages neither."""
  keys = _API_KEY.value
  if keys is None:
    found = os.environ.get(_API_KEY_VARIABLE)
    return [found] if found else []
  if not all(keys):
    raise errors.UserError('--api_key is empty; leave it out to ask for none')
  return keys


def _make(declared: ProgramSizes) -> tuple[Engine, ss.Model]:
  """Returns the engine and its target."""
  if hosts.is_together():
    _check_processes()
  is_auto = _POLICY.value == policy_names.GOODPUT and not cost_flags.files()
  engine, target = engine_flags.make_engine(declared, looks_up=is_auto)
  policies = cost_flags.Policies(engine, target, declared)
  engine.policy = policies.make(_POLICY.value)
  if hosts.is_together():
    engine.policy = FromProcessZero(engine.policy)
  return engine, target


def _check_processes() -> None:
  """Raises UserError if processes cannot serve together."""
  processes = {x.process_index for x in device_flags.target_devices()}
  if 0 not in processes:
    raise errors.UserError(
      f'--target_processes={",".join(map(str, sorted(processes)))} must '
      'contain 0, which answers the requests'
    )
  files = draft_flags.files() + cost_flags.files()
  shared_flags.compare_files([engine_flags.mode()], *files)


def _bind() -> socket.socket:
  """Returns a socket with the address; nobody can connect yet."""
  address = _HOST.value, _PORT.value
  try:
    family = socket.getaddrinfo(*address)[0][0]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
  except OSError as error:
    raise errors.UserError(
      f'cannot listen at {address[0]}:{address[1]}: {error.strerror}; choose '
      'another --port or --host'
    ) from error
  return listener


if __name__ == '__main__':
  program.run(main)
