r"""An HTTP server with OpenAI's interface.

  python -m experiments.serve --mode=prompt_lookup --policy=fixed_3 --port=8000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "smollm2-135m-instruct", "prompt": "The sea is"}'

Compiles everything, then opens the port. Ctrl-C or SIGTERM end it when what
runs is done; a second one at once. Needs the extra `serve`. docs/serving.md
has more.
"""

import socket

from absl import flags

from experiments import cost_flags, engine_flags, policy_names, program
from swiftspec_jax import errors

_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
_PORT = flags.DEFINE_integer(
  'port', 8000, '0 takes a free one.', lower_bound=0, upper_bound=65535
)
_POLICY = flags.DEFINE_string(
  'policy', 'none', f'How much to speculate: {policy_names.HELP}'
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
  declared = engine_flags.sizes()
  cost_flags.check([_POLICY.value])
  # Found out before the compilation, which takes long.
  listener = _bind()
  engine, target = engine_flags.make_engine(declared)
  policies = cost_flags.Policies(engine, target, declared)
  engine.policy = policies.make(_POLICY.value)
  engine.warm_up(show_progress=True)
  service = Service(
    engine,
    target,
    name=_SERVED_MODEL_NAME.value,
    max_waiting=_MAX_WAITING.value,
  )
  host, port = listener.getsockname()[:2]
  print(f'{service.name} at http://{host}:{port}/v1', flush=True)
  run.Server(service).serve_on(listener)


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
