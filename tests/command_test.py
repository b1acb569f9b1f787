"""The command `swiftspec`."""

import ast
import gc
import os
import re
import signal
import subprocess
import sys
import time

import programs
import pytest

import swiftspec_jax as ss
from swiftspec_jax.cli import extras, program, short_help


def call(*arguments):
  """Status, output and complaints of the command."""
  return programs.run('command', *arguments)


@pytest.mark.parametrize('arguments', [(), ('--help',), ('help',)])
def test_alone_it_lists_the_commands(arguments):
  status, output, complaints = call(*arguments)
  assert (status, complaints) == (0, '')
  lines = output.splitlines()
  for name, listed in short_help.COMMANDS.items():
    assert f'  {name:<13} {listed.summary}' in lines
  assert max(map(len, lines)) <= 80


def test_unknown_commands_are_told_those_that_exist():
  status, output, complaints = call('generat', '--prompt=a')
  assert (status, output) == (2, '')
  assert complaints == (
    "error: there is no command 'generat'; do you mean 'generate'?\n"
  )
  _, _, complaints = call('--prompt=a')
  assert complaints == (
    "error: there is no command '--prompt=a'; choose one of demo, doctor, "
    'generate, chat, serve, generate_data, train_draft, build_store, '
    'benchmark, tune, plan, report\n'
  )


@pytest.mark.parametrize('arguments', [['--help'], ['doctor', '--help']])
def test_a_reader_of_help_may_go(arguments):
  reading, writing = os.pipe()
  os.close(reading)
  done = subprocess.run(
    [sys.executable, '-m', 'swiftspec_jax.cli.command', *arguments],
    cwd=programs.ROOT,
    stdout=writing,
    stderr=subprocess.PIPE,
    text=True,
    check=False,
  )
  os.close(writing)
  assert (done.returncode, done.stderr) == (0, '')


def test_it_says_its_version():
  assert call('--version') == (0, f'swiftspec {ss.__version__}\n', '')


def test_commands_are_the_programs():
  for listed in short_help.COMMANDS.values():
    path = programs.ROOT / f'{listed.module.replace(".", "/")}.py'
    (last,) = ast.parse(path.read_text()).body[-1:]
    assert ast.unparse(last.test) == "__name__ == '__main__'"


def test_a_command_has_the_flags_of_its_program():
  status, output, complaints = call('doctor', '--nostep')
  assert status == 0, complaints
  assert 'swiftspec_jax' in output
  status, _, complaints = call('report', 'no-such-folder', '--output=a.html')
  assert status == 1
  assert 'no-such-folder' in complaints


def call_with_matplotlib(folder, code):
  """Has matplotlib do something else as it is imported.

  The folder is that of somebody who has packages of the same names as ours.
  """
  (folder / 'matplotlib.py').write_text(code)
  for name in ('experiments', 'configs'):
    (folder / name).mkdir()
    (folder / name / '__init__.py').touch()
  start = 'from swiftspec_jax.cli import command; command.main()'
  return subprocess.run(
    [sys.executable, '-c', start, 'report'],
    cwd=folder,
    env={'PYTHONPATH': os.pathsep.join([str(folder), str(programs.ROOT)])},
    capture_output=True,
    text=True,
    check=False,
  )


def test_missing_packages_are_explained(tmp_path):
  """As after an installation without extras."""
  done = call_with_matplotlib(
    tmp_path,
    'import configs.deployment\n'
    "raise ModuleNotFoundError('no matplotlib', name='matplotlib')",
  )
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1] == (
    f'error: no matplotlib; it needs: {extras.how_to_install("experiments")}'
  )


def test_extras_are_installed_from_the_checkout_or_by_their_packages(
  monkeypatch, tmp_path
):
  assert extras.how_to_install('serve') == (
    f"{sys.executable} -m pip install -e '{programs.ROOT}[serve]'"
  )
  monkeypatch.setattr(extras, 'CHECKOUT', tmp_path)  # as beside a wheel
  command = extras.how_to_install('experiments')
  assert re.fullmatch(
    r".* -m pip install 'matplotlib[<>=,.\d]+' 'rich[<>=,.\d]+'", command
  )


def test_ctrl_c_amid_imports_is_no_traceback(tmp_path):
  done = call_with_matplotlib(tmp_path, 'raise KeyboardInterrupt')
  assert (done.returncode, done.stderr) == (130, '\ninterrupted\n')


@pytest.fixture
def interruptible():
  """Ctrl-C comes, also if pytest is a job in the background (`programs`)."""
  previous = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures('interruptible')
def test_ctrl_c_in_a_callback_of_the_garbage_collector_is_not_lost(monkeypatch):
  def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    raise KeyboardInterrupt

  def work():
    gc.collect()  # Python drops it here
    time.sleep(60)

  monkeypatch.setattr(sys, 'unraisablehook', pytest.fail)
  program.keep_interrupts()
  gc.callbacks.append(interrupt)
  with pytest.raises(KeyboardInterrupt):
    work()
