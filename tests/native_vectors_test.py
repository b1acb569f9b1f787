"""Native kernels for processors with other vectors than those of this one."""

import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys

import pytest

_TESTS = ('few_rows_test.py', 'gguf_blocks_test.py')


@pytest.mark.ci
@pytest.mark.skipif(
  platform.machine() != 'x86_64' or shutil.which('c++') is None,
  reason='needs a compiler for x86-64',
)
@pytest.mark.parametrize(
  'target',
  [
    pytest.param('x86-64-v2', id='16 bytes, as on ARM'),
    pytest.param('x86-64-v3', id='AVX2'),
  ],
)
def test_kernels_are_right_with_other_vectors(target, tmp_path):
  if target == 'x86-64-v3' and 'avx512_vnni' not in _instructions():
    pytest.skip('tests of the kernels themselves are those of AVX2 here')
  compiler = tmp_path / 'c++'
  compiler.write_text(
    f'#!/bin/sh\nexec {shlex.quote(shutil.which("c++"))} "$@" -march={target}\n'
  )
  compiler.chmod(0o755)
  folder = pathlib.Path(__file__).parent
  subprocess.run(
    [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
    + [str(folder / name) for name in _TESTS],
    check=True,
    env=os.environ
    | {'CXX': str(compiler), 'SWIFTSPEC_CACHE': str(tmp_path / 'cache')},
  )


def _instructions() -> str:
  return pathlib.Path('/proc/cpuinfo').read_text()
