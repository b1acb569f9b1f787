"""The command `swiftspec`, which runs the programs of this folder.

  swiftspec generate --prompt='Why is the sky blue?'

is `python -m experiments.generate --prompt='Why is the sky blue?'`. The command
starts in `swiftspec_command`.
"""

import difflib
import runpy
import sys

import swiftspec_jax
from experiments import extras, short_help
from experiments.output import pipes

_EXTRAS = {
  'fastapi': 'serve',
  'matplotlib': 'experiments',
  'prometheus_client': 'serve',
  'rich': 'experiments',
  'uvicorn': 'serve',
}
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
    print(f'error: there is no command {name!r}; {hint}', file=sys.stderr)
    sys.exit(_USAGE)
  elif {*short_help.ASKED} & {*arguments}:
    _print(short_help.of_command(name))
  else:
    del sys.argv[1]
    _run(f'experiments.{short_help.COMMANDS[name].module}')


def _print(text: str) -> None:
  with pipes.reader_may_go():
    print(text)


def _run(module: str) -> None:
  """Runs a module as `python -m` does."""
  try:
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  except ModuleNotFoundError as error:
    extra = _EXTRAS.get((error.name or '').partition('.')[0])
    if extra is None:
      raise
    print(
      f'error: {error}; it needs: {extras.how_to_install(extra)}',
      file=sys.stderr,
    )
    sys.exit(1)
  except KeyboardInterrupt:  # amid the imports, which take seconds
    print('\ninterrupted', file=sys.stderr)
    sys.exit(_INTERRUPTED)


if __name__ == '__main__':
  main()
