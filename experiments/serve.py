r"""An HTTP server with OpenAI's interface.

  python -m experiments.serve --port=8000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "smollm2-135m-instruct", "prompt": "The sea is"}'

Compiles what the first requests need, opens the port, and compiles the rest in
the background; with --warm_up=full it compiles everything first. Ctrl-C or
SIGTERM end it when what runs is done; a second one at once. Needs the extra
`serve`. docs/start/serve.md has more.
"""

import os
import socket

from absl import flags

import swiftspec_jax as ss
from experiments import program
from experiments.flags import cost_flags, engine_flags, policy_names
from swiftspec_jax import errors
from swiftspec_jax.engine.engine import Engine

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
flags.FLAGS.set_default('share_prefixes', True)

# Shared flags whose values come from clients here.
_SAMPLING = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'seed')


def main() -> None:
  """Runs the program."""
  try:
    from swiftspec_jax.server import run
    from swiftspec_jax.server.service import Service
  except ImportError as error:
    raise errors.UserError(
      f"{error}; the server needs: pip install 'swiftspec_jax[serve]'"
    ) from error
  for name in _SAMPLING:
    if flags.FLAGS[name].present:
      raise errors.UserError(
        f'--{name} has no effect on a server: its clients say what they want'
      )
  api_keys = _api_keys()
  engine, target, listener = _make()
  if _WARM_UP.value == 'full':
    engine.programs.compile_all(show_progress=True)
  else:
    engine.programs.start()
  service = Service(
    engine,
    target,
    name=_SERVED_MODEL_NAME.value,
    max_waiting=_MAX_WAITING.value,
  )
  host, port = listener.getsockname()[:2]
  print(f'{service.name} at http://{host}:{port}/v1', flush=True)
  server = run.Server(
    service, api_keys=api_keys, max_body_bytes=_MAX_BODY_BYTES.value
  )
  server.serve_on(listener)
  if not engine.programs.join(_PATIENCE):
    program.leave()


def _api_keys() -> list[str]:
  """Returns the keys; never shown, in messages neither."""
  keys = _API_KEY.value
  if keys is None:
    found = os.environ.get(_API_KEY_VARIABLE)
    return [found] if found else []
  if not all(keys):
    raise errors.UserError('--api_key is empty; leave it out to ask for none')
  return keys


def _make() -> tuple[Engine, ss.Model, socket.socket]:
  """Returns the engine, its target, and a socket with the address."""
  declared = engine_flags.sizes()
  cost_flags.check([_POLICY.value])
  listener = _bind()  # it is found out early, as loading takes long
  engine, target = engine_flags.make_engine(declared)
  policies = cost_flags.Policies(engine, target, declared)
  engine.policy = policies.make(_POLICY.value)
  return engine, target, listener


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
