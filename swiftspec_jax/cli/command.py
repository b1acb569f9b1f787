"""The command `swiftspec`.

  swiftspec generate --prompt='Why is the sky blue?'

is `python -m swiftspec_jax.cli.generate --prompt='Why is the sky blue?'`.
Commands that measure are programs of `experiments`, which only a checkout has.
"""

import difflib
import importlib.util
import runpy
import sys

import swiftspec_jax
from swiftspec_jax.cli import extras, pipes, short_help

_EXTRAS = {
  'fastapi': 'serve',
  'matplotlib': 'experiments',
  'prometheus_client': 'serve',
  'rich': 'experiments',
  'uvicorn': 'serve',
}
_OF_CHECKOUT = ('configs', 'experiments')
# Exit statuses: of a wrong command line as absl has it, of Ctrl-C as shells.
_USAGE, _INTERRUPTED = 2, 130


def main() -> None:
  """Runs the program that the command line names."""
  name, *arguments = sys.argv[1:] or ['--help']
  if name in ('help', *short_help.ASKED):
    _print(short_help.of_all())
  elif name == '--version':
    _print(f'swiftspec {swiftspec_jax.__version__}')
  elif name not in short_help.COMMANDS:
    nearest = difflib.get_close_matches(
      name.lstrip('-'), short_help.COMMANDS, n=1
    )
    hint = f'do you mean {nearest[0]!r}?' if nearest else ''
    hint = hint or f'choose one of {", ".join(short_help.COMMANDS)}'
    _fail(f'there is no command {name!r}; {hint}', _USAGE)
  elif {*short_help.ASKED} & {*arguments}:
    _print(short_help.of_command(name))
  else:
    del sys.argv[1]
    _run(name)


def _print(text: str) -> None:
  with pipes.reader_may_go():
    print(text)


def _fail(message: str, status: int = 1) -> None:
  print(f'error: {message}', file=sys.stderr)
  sys.exit(status)


def _run(name: str) -> None:
  """Runs the module of a command as `python -m` does."""
  module = short_help.COMMANDS[name].module
  try:
    if module.partition('.')[0] in _OF_CHECKOUT:
      _find_checkout(name)
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  except ModuleNotFoundError as error:
    extra = _EXTRAS.get((error.name or '').partition('.')[0])
    if extra is None:
      raise
    _fail(f'{error}; it needs: {extras.how_to_install(extra)}')
  except KeyboardInterrupt:  # amid the imports, which take seconds
    print('\ninterrupted', file=sys.stderr)
    sys.exit(_INTERRUPTED)


def _find_checkout(name: str) -> None:
  """Imports the packages beside ours, whatever else has their names.

  Folders of research often have packages `experiments` and `configs`, which
  Python would find first where they are on its path.
  """
  for package in _OF_CHECKOUT:
    path = extras.CHECKOUT / package / '__init__.py'
    if not path.exists():
      _fail(
        f'swiftspec {name} needs a checkout of the project, as it is no part '
        'of the installed package'
      )
    spec = importlib.util.spec_from_file_location(package, path)
    sys.modules[package] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[package])


if __name__ == '__main__':
  main()
