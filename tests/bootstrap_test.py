"""The bootstrap, on a tiny project that builds without a package index."""

import ast
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

import bootstrap

BACKEND = """
import pathlib
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
  with zipfile.ZipFile(pathlib.Path(folder) / NAME, 'w') as wheel:
    wheel.writestr('tiny.pth', '')
    wheel.writestr(INFO + '/METADATA', METADATA)
    wheel.writestr(INFO + '/WHEEL', WHEEL)
    wheel.writestr(INFO + '/RECORD', '')
  return NAME

NAME = 'tiny-1.0-py3-none-any.whl'
INFO = 'tiny-1.0.dist-info'
METADATA = 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n' + ''.join(
  'Provides-Extra: %s\\n' % extra for extra in ('docs', 'test')
)
WHEEL = 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = 'backend'
backend-path = ['.']
"""


@pytest.fixture(autouse=True)
def no_index(monkeypatch):
  monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
  monkeypatch.setenv('PIP_RETRIES', '0')
  monkeypatch.setenv('PIP_NO_INDEX', '1')


def checkout(folder: pathlib.Path) -> pathlib.Path:
  """Fills a folder with the real bootstrap.py and what it installs."""
  shutil.copy(bootstrap.__file__, folder)
  (folder / 'backend.py').write_text(BACKEND)
  (folder / 'pyproject.toml').write_text(PYPROJECT)
  (folder / 'requirements.txt').touch()
  return folder


@pytest.fixture
def project(tmp_path):
  """A checkout of its own."""
  return checkout(tmp_path)


@pytest.fixture(scope='module')
def shared_project(tmp_path_factory):
  """A checkout for tests that go on with whatever its environment holds."""
  return checkout(tmp_path_factory.mktemp('project'))


def run(project: pathlib.Path, *extras: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, 'bootstrap.py', '--venv', 'venv', *extras],
    cwd=project,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def test_installs_only_what_is_missing(shared_project):
  assert not (shared_project / 'venv').exists()  # the first test that has it
  # What a killed installation leaves is not built upon.
  (shared_project / 'venv' / 'bin').mkdir(parents=True)
  (shared_project / 'venv' / 'bin' / 'python').touch()
  first = run(shared_project, 'test')
  assert first.returncode == 0, first.stderr
  assert 'making the environment' in first.stdout
  assert 'installing .[test]' in first.stdout

  again = run(shared_project, 'test')
  assert (again.returncode, again.stdout, again.stderr) == (0, '', '')

  more = run(shared_project, 'docs')
  assert 'making the environment' not in more.stdout
  assert 'installing .[docs,test]' in more.stdout
  assert run(shared_project, 'test').stdout == ''

  (shared_project / 'requirements.txt').write_text('# changed\n')
  assert 'installing .[docs,test]' in run(shared_project, 'test').stdout


def test_uv_installs_if_it_is_named(project):
  uv = shutil.which('uv')
  if uv is None:
    pytest.skip('there is no uv')
  assert run(project, '--uv', uv, 'test').returncode == 0
  assert run(project, 'test').stdout == ''
  (project / 'backend.py').write_text('')
  failed = run(project, '--uv', uv, 'docs')
  assert failed.returncode == 1
  assert failed.stderr.splitlines()[-1] == (
    'bootstrap: uv failed; its message is above'
  )


def test_an_unreachable_index_is_one_sentence(shared_project, monkeypatch):
  assert run(shared_project).returncode == 0
  stamp = shared_project / 'venv' / 'bootstrap.stamp'
  before = json.loads(stamp.read_text())
  pyproject = shared_project / 'pyproject.toml'
  pyproject.write_text(
    PYPROJECT.replace('requires = []', "requires = ['setuptools']")
  )
  with socket.socket() as closed:  # bound, so nobody else can listen there
    closed.bind(('127.0.0.1', 0))
    port = closed.getsockname()[1]
    monkeypatch.setenv('PIP_INDEX_URL', f'http://127.0.0.1:{port}/simple')
    monkeypatch.delenv('PIP_NO_INDEX')
    failed = run(shared_project)

  assert failed.returncode == 1
  last_line = failed.stderr.splitlines()[-1]
  assert last_line.startswith('bootstrap: the package index cannot be reached')
  assert 'Traceback' not in failed.stderr
  # What was installed is whole, so that it can be used without a network.
  assert json.loads(stamp.read_text()) == before
  pyproject.write_text(PYPROJECT)
  assert run(shared_project).stdout == ''


@pytest.mark.parametrize('version', [(3, 6, 15), (3, 10, 0)])
def test_an_old_python_is_named(version):
  problem = bootstrap.python_problem(version)
  assert 'needs Python >= 3.11' in problem
  assert f'{sys.executable} is Python 3.{version[1]};' in problem


def test_supported_pythons_have_no_problem():
  assert not bootstrap.python_problem((3, 11, 0))
  assert not bootstrap.python_problem((4, 0, 0))


def test_an_old_python_gets_as_far_as_the_message():
  source = pathlib.Path(bootstrap.__file__).read_text()
  ast.parse(source, feature_version=(3, 6))


def test_a_requirements_file_is_installed_and_watched(shared_project):
  (shared_project / 'more.txt').write_text('# nothing\n')
  options = ('--requirements', 'more.txt')
  assert 'installing .' in run(shared_project, *options).stdout
  assert run(shared_project, *options).stdout == ''
  (shared_project / 'more.txt').write_text('no-such-shared_project==1\n')
  failed = run(shared_project, *options)
  assert failed.returncode == 1
  assert 'no-such-shared_project' in failed.stderr
