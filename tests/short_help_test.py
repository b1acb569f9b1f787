"""The help of commands: what it says is true, and it comes at once."""

import functools
import importlib.util
import re
import subprocess
import sys

import programs
import pytest

from swiftspec_jax.cli import short_help

_START = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from swiftspec_jax.cli import command
command.main()
"""
CLI = 'swiftspec_jax.cli'
_FLAG = re.compile(r'^  --(\[no\])?(\w+):\s(.*?)(?=^  -|^\w|\Z)', re.M | re.S)


@functools.cache
def all_flags(module):
  """Returns the default of each flag of a program, as absl writes it."""
  status, listed, complaints = programs.run(module, '--helpfull')
  assert (status, complaints) == (0, '')
  found = {}
  for is_bool, name, text in _FLAG.findall(listed):
    default = re.search(r"\(default: '(.*?)'\)", text, re.S)
    found[name] = default[1] if default else None
    if is_bool:
      found[f'no{name}'] = {'true': 'false', 'false': 'true'}.get(found[name])
  return found


def is_shown(shown, default):
  """Whether a help shows a flag's default; capitals stand for any value."""
  if not shown:  # a flag without a value, which changes something
    return default == 'false'
  if shown.isupper():
    return default in (None, '', '[]') or '/' in default
  return shown in (default, default.removesuffix('.0'))


@pytest.mark.parametrize('name', short_help.COMMANDS)
def test_flags_of_helps_are_those_of_the_programs(name):
  command = short_help.COMMANDS[name]
  known = all_flags(command.module.rpartition('.')[2])
  for text in command.flags:
    flag, _, shown = text.partition('=')
    assert is_shown(shown, known[flag]), (text, known[flag])
  arguments = ' '.join([command.arguments, *command.examples])
  for program in (name, *(x.split()[0] for x in command.examples)):
    module = short_help.COMMANDS[program].module
    known = known | all_flags(module.rpartition('.')[2])
  assert {*re.findall(r'--(\w+)', arguments)} <= {*known}


@pytest.mark.parametrize('name', short_help.COMMANDS)
def test_a_help_fits_on_a_screen(name):
  lines = short_help.of_command(name).splitlines()
  assert len(lines) <= 24
  assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
  'arguments', [['--help'], ['generate', '--help'], ['--version']]
)
def test_help_imports_little(arguments):
  done = subprocess.run(
    [sys.executable, '-c', _START, *arguments],
    cwd=programs.ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.startswith('swiftspec ')
  imported = {name.partition('.')[0] for name in done.stderr.split()}
  assert not imported & {'absl', 'jax', 'numpy', 'transformers'}


def test_programs_have_the_help_of_their_commands():
  for asked in short_help.ASKED:
    shown = short_help.of_command('report') + '\n'
    assert programs.run('report', asked) == (0, shown, '')


def test_programs_that_are_no_command_list_their_own_flags():
  status, output, complaints = programs.run('kernels', '--help')
  assert (status, complaints) == (0, '')
  assert output.startswith('Times kernels, compares them')
  assert '\nexperiments.kernels.__main__:\n  --every: ' in output


def test_former_names_of_commands_run_until_0_4():
  names = 'build_store demo doctor generate generate_data serve train_draft'
  for name in names.split():
    found = importlib.util.find_spec(f'experiments.{name}')
    assert found.origin == importlib.util.find_spec(f'{CLI}.{name}').origin
    assert short_help.of_module(found.name) == short_help.of_command(name)
  assert short_help.of_module('experiments.compare') is None
