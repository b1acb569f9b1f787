"""The start of every program: logs, caches, errors and exit codes."""

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import jax
from absl import app, flags
from absl import logging as absl_logging

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import builtin
from swiftspec_jax.cli import pipes, short_help
from swiftspec_jax.runtime import hosts

_INTERRUPTED = 130  # what a shell reports for Ctrl-C
_RETRY_SECONDS = 0.1


def run(main: Callable[[], None]) -> None:
  """Parses the flags, runs `main` and exits.

  A `UserError` becomes one line on standard error and exit status 1, and
  Ctrl-C exit status 130, both without a traceback.
  """

  def without_arguments(arguments: list[str]) -> None:
    if arguments:
      raise errors.UserError(
        f'unexpected argument {arguments[0]!r}; flags are given as --name=value'
      )
    main()

  run_with_arguments(without_arguments)


def run_with_arguments(main: Callable[[list[str]], None]) -> None:
  """Does what `run` does; `main` gets the arguments that are no flags."""
  # Unless the level of the log is chosen, absl would show more than warnings.
  flags.FLAGS['verbosity'].using_default_value = False
  with pipes.reader_may_go():  # of the help, too
    if (text := _help()) is not None:
      print(text)
    else:
      app.run(functools.partial(_main, main))


def _help() -> str | None:
  """Returns the help that the command line asks for; None if it does not."""
  main = sys.modules['__main__']
  module = getattr(main.__spec__, 'name', sys.argv[0])
  if short_help.ALL_ASKED in sys.argv:
    listed = flags.FLAGS.get_help()
  elif {*short_help.ASKED} & {*sys.argv}:
    if (text := short_help.of_module(module)) is not None:
      return text
    listed = flags.FLAGS.main_module_help()
    listed = f'{listed}\n\n{short_help.ALL_ASKED} lists all flags.'
  else:
    return None
  # absl calls the flags of the program by the path of its file.
  return f'{main.__doc__}{listed.replace(sys.argv[0], module)}'


def _main(main: Callable[[list[str]], None], argv: Sequence[str]) -> int:
  set_up()
  keep_interrupts()
  try:
    main(list(argv[1:]))
    sys.stdout.flush()
    hosts.leave()
  except errors.UserError as error:
    # Messages that quote those of other libraries can have many lines.
    message = ' '.join(str(error).split())
    _tell_others(message)
    print('error:', message, file=sys.stderr)
    return _failed()
  except KeyboardInterrupt:
    print('\ninterrupted', file=sys.stderr)
    leave(_INTERRUPTED)
  except BrokenPipeError:
    pipes.silence()
    _tell_others('nobody reads the output any more')
    return _failed()
  except Exception as error:
    if not hosts.is_together():
      raise
    # It may be a consequence of another's end, which is the better message.
    hosts.wait_for_end()
    _tell_others(repr(error))
    traceback.print_exc()
    return _failed()
  return 0


def _tell_others(reason: str) -> None:
  """Tells other processes, if there are some, why this one ends."""
  if hosts.is_together():
    hosts.leave(reason)
    sys.stderr = sys.__stderr__  # may have been silenced


def _failed() -> int:
  """Returns the exit status; exits itself if JAX would wait for others."""
  if hosts.is_together():
    hosts.wait_for_others()
    leave(1)
  return 1


def leave(status: int = 0) -> NoReturn:
  """Ends at once: JAX can crash in Python's own end.

  It does while programs run or are being compiled.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def set_up() -> None:
  """Prepares logs and caches of a process."""
  absl_logging.get_absl_handler().setFormatter(logging.Formatter('%(message)s'))
  # For transformers, which is imported with the first tokenizer.
  os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update(
      'jax_compilation_cache_dir', str(builtin.cache_dir() / 'compiled')
    )
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


@contextlib.contextmanager
def reporting(report: Callable[[], None]) -> Iterator[None]:
  """Reports after its block, and after Ctrl-C in it, too."""
  try:
    yield
  except KeyboardInterrupt:
    report()
    raise
  report()


def keep_interrupts() -> None:
  """Has Ctrl-C come again where Python would drop it.

  It drops what is raised in a callback of the garbage collector, and JAX has
  one.
  """
  report = sys.unraisablehook

  def retry(unraisable):
    if unraisable.exc_type is KeyboardInterrupt:
      # Later, as this is still the callback.
      again = functools.partial(os.kill, os.getpid(), signal.SIGINT)
      threading.Timer(_RETRY_SECONDS, again).start()
    else:
      report(unraisable)

  sys.unraisablehook = retry
