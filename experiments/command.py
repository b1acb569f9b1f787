"""The command `swiftspec`, which runs the programs of this folder.

  swiftspec generate --prompt='Why is the sky blue?'

is `python -m experiments.generate --prompt='Why is the sky blue?'`. The command
starts in `swiftspec_command`.
"""

import difflib
import runpy
import sys

from experiments.output import pipes

# By command: the module, and what it does.
PROGRAMS = {
  'demo': ('demo', 'the same answers, plainly and with speculation'),
  'doctor': ('doctor', 'what is installed, and how fast a step is'),
  'generate': ('generate', 'decode a prompt, or a file of prompts'),
  'chat': ('generate', 'talk with a model, in the terminal'),
  'serve': ('serve', "an HTTP server with OpenAI's interface, and a page"),
  'benchmark': ('benchmark', 'speed and acceptance of ways to decode'),
  'tune': ('tune', 'find the best sizes of trees for this machine'),
  'plan': ('plan', 'predict the speed on chips that are not there'),
  'report': ('report', 'one page of result folders; compare two of them'),
}
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
  name = next(iter(sys.argv[1:]), '--help')
  if name in ('help', '-h', '--help'):
    with pipes.reader_may_go():
      print(_help())
  elif name in PROGRAMS:
    module, _ = PROGRAMS[name]
    del sys.argv[1]
    _run(f'experiments.{module}')
  else:
    nearest = difflib.get_close_matches(name.lstrip('-'), PROGRAMS, n=1)
    hint = f'do you mean {nearest[0]!r}?' if nearest else ''
    hint = hint or f'choose one of {", ".join(PROGRAMS)}'
    print(f'error: there is no command {name!r}; {hint}', file=sys.stderr)
    sys.exit(_USAGE)


def _help() -> str:
  lines = [f'  {name:<10} {text}' for name, (_, text) in PROGRAMS.items()]
  return '\n'.join(
    [
      'swiftspec COMMAND [--flag=value ...]',
      '',
      *lines,
      '',
      'swiftspec COMMAND --help lists the flags of a command.',
      'python -m experiments.NAME runs further programs; the docs list them.',
    ]
  )


def _run(module: str) -> None:
  """Runs a module as `python -m` does."""
  try:
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  except ModuleNotFoundError as error:
    extra = _EXTRAS.get((error.name or '').partition('.')[0])
    if extra is None:
      raise
    print(
      f"error: {error}; it needs: pip install 'swiftspec_jax[{extra}]'",
      file=sys.stderr,
    )
    sys.exit(1)
  except KeyboardInterrupt:  # amid the imports, which take seconds
    print('\ninterrupted', file=sys.stderr)
    sys.exit(_INTERRUPTED)


if __name__ == '__main__':
  main()
