"""Native kernels for other processors than this one, and under sanitizers."""

import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys

import jax
import pytest

from kernels_pallas.native import library

_TESTS = ('few_rows_test.py', 'gguf_blocks_test.py')
_FOLDER = pathlib.Path(__file__).parent
_SOURCES = pathlib.Path(library.__file__).parent
needs_sanitizers = pytest.mark.skipif(
  platform.system() != 'Linux' or shutil.which('c++') is None,
  reason='needs a compiler and its sanitizers',
)


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
  cpus = pathlib.Path('/proc/cpuinfo')
  if target == 'x86-64-v3' and 'avx512_vnni' not in cpus.read_text():
    pytest.skip('tests of the kernels themselves are those of AVX2 here')
  _run(_TESTS, tmp_path, f'-march={target}')


@pytest.mark.ci
@needs_sanitizers
def test_kernels_touch_no_memory_of_others(tmp_path):
  libraries = [_library('libasan.so'), _library('libstdc++.so')]
  attention = 'same_bits_test.py::test_of_a_tiny_model[bfloat16-True]'
  chosen = (
    'multiplied or norm or integers or table or outputs or native or tiny'
  )
  _run(
    (*_TESTS, 'kv_commit_test.py', attention, '-k', chosen),
    tmp_path,
    '-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g1',
    LD_PRELOAD=' '.join(libraries),
    ASAN_OPTIONS='detect_leaks=0',  # those of Python and XLA
  )


@pytest.mark.ci
@needs_sanitizers
def test_threads_that_share_work_have_no_races(tmp_path):
  program = tmp_path / 'parallel'
  options = ['-std=c++17', '-O1', '-g1', '-fsanitize=thread', '-pthread']
  includes = [f'-I{_SOURCES}', '-isystem', jax.ffi.include_dir()]
  source = _FOLDER / 'parallel_main.cc'
  subprocess.run(
    ['c++', *options, *includes, source, '-o', program], check=True
  )
  subprocess.run([program], check=True)


def _run(tests, tmp_path, options, **variables):
  """Runs tests with kernels that are compiled with further options."""
  compiler = tmp_path / 'c++'
  compiler.write_text(
    f'#!/bin/sh\nexec {shlex.quote(shutil.which("c++"))} "$@" {options}\n'
  )
  compiler.chmod(0o755)
  variables |= {
    'CXX': str(compiler),
    'SWIFTSPEC_CACHE': str(tmp_path / 'cache'),
  }
  subprocess.run(
    [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *tests],
    check=True,
    cwd=_FOLDER,
    env=os.environ | variables,
  )


def _library(name):
  command = ['c++', f'-print-file-name={name}']
  return subprocess.check_output(command, text=True).strip()
