"""The README and the first pages, block by block, as a new user runs them.

A comment above a fenced block says what is special about it: `<!-- test: skip,
REASON -->`, or `<!-- test: server -->` for one that runs until its page ends.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

import programs
import pytest

from swiftspec_jax.runtime import connections

PAGES = [
  'README.md',
  *(f'docs/start/{p.name}' for p in programs.ROOT.glob('docs/start/*.md')),
]
_BLOCK = re.compile(
  r'(?:^<!-- test: (?P<mark>.+) -->\n)?'
  r'^```(?P<language>.*)\n(?P<text>(?:.*\n)*?)^```$',
  re.MULTILINE,
)
_LEFT_OUT = ('.ci', '.git', '.venv*', '.*cache*', '__pycache__', 'build')
_TYPED = 'Hi!\n'  # to programs that read, and then their input ends


def blocks(page):
  """Returns mark ('' without one), language and text of each block."""
  text = (programs.ROOT / page).read_text()
  return [
    (m['mark'] or '', m['language'], m['text']) for m in _BLOCK.finditer(text)
  ]


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
  """A copy of the checkout with the environment that runs the tests."""
  copy = tmp_path_factory.mktemp('checkout') / 'copy'
  ignore = shutil.ignore_patterns(*_LEFT_OUT)
  shutil.copytree(programs.ROOT, copy, ignore=ignore)
  (copy / '.venv').symlink_to(sys.prefix)
  return copy


def options(checkout):
  """How to start a process in the copy, with its modules."""
  environment = {
    **os.environ,
    'HF_HUB_OFFLINE': '1',
    # A large model takes longer to compile than to write some tokens.
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(checkout),
  }
  return {'cwd': checkout, 'env': environment, 'text': True}


@contextlib.contextmanager
def serving(command, checkout, port):
  """Runs a server while it is needed; it has to end without complaint."""
  process = subprocess.Popen(
    ['bash', '-c', f'exec {command.strip()} --port={port}'], **options(checkout)
  )
  health = f'http://localhost:{port}/health'

  def is_there():
    assert process.poll() is None
    with contextlib.suppress(OSError):
      return urllib.request.urlopen(health).status

  try:
    programs.wait_for(is_there)
    yield
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
  finally:
    process.kill()
    process.wait()


@pytest.mark.ci
@pytest.mark.parametrize('page', PAGES)
def test_blocks_work_one_after_the_other(page, checkout):
  port = connections.free_port()
  with contextlib.ExitStack() as stack:
    for mark, language, text in blocks(page):
      if mark == 'server':
        stack.enter_context(serving(text, checkout, port))
      elif not mark:
        start = {
          'bash': ['bash', '-euo', 'pipefail', '-c'],
          'python': ['.venv/bin/python', '-c'],
        }[language]
        text = text.replace('localhost:8000', f'localhost:{port}')
        done = subprocess.run(
          [*start, text],
          input=_TYPED,
          capture_output=True,
          timeout=300,
          **options(checkout),
        )
        assert done.returncode == 0, f'{text}\n{done.stderr}'
        assert done.stdout, text


@pytest.mark.parametrize('page', PAGES)
def test_every_block_is_run_or_says_why_not(page):
  fences = re.findall('^```', (programs.ROOT / page).read_text(), re.MULTILINE)
  assert len(fences) == 2 * len(blocks(page))
  for mark, language, text in blocks(page):
    assert mark in ('', 'server') or re.fullmatch('skip, .+', mark), text
    assert language in ('bash', 'python'), text
