"""The library of all native kernels: compiled once, then loaded.

`$CXX`, by default `c++`, compiles it for this very CPU when a kernel is first
wanted. It is kept in the cache folder. Its name is the hash of all that it is
made of: sources, flags, CPU and jaxlib.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading
from concurrent import futures
from typing import Any

import filelock
import jax
import jaxlib
from absl import logging

from kernels_pallas import user_cache

# Functions of the library, each a target of `jax.ffi`.
HANDLERS = (
  'few_rows_float32',
  'few_rows_bfloat16',
  'few_rows_int8',
  'gguf_multiply',
  'gguf_take',
  'tree_attention',
  'paged_attention',
)
REMEDY = (
  'install one (on Debian and Ubuntu: apt install g++; on macOS: xcode-select '
  '--install), or name it in CXX'
)
_FLAGS = ('-O3', '-std=c++17', '-fPIC', '-pthread')
_HERE = pathlib.Path(__file__).parent
_SECONDS = 300
_INTEL = ('x86_64', 'AMD64')
_lock = threading.Lock()


def call(
  handler: str, results: Any, *arrays: jax.Array, **attributes: Any
) -> Any:
  """Returns what one of `HANDLERS` makes of arrays, on XLA's CPU backend.

  Args:
    handler: name of the function.
    results: jax.ShapeDtypeStruct of each result.
    *arrays: arguments.
    **attributes: what the function has beside them, in NumPy's types.

  Raises:
    NotImplementedError: there is no library, see `check`.
  """
  check()
  target = jax.ffi.ffi_call(_target(handler), results)
  return target(*arrays, **attributes)


def check() -> None:
  """Loads the library.

  Raises:
    NotImplementedError: it cannot be compiled, with the reason and the remedy.
  """
  with _lock:
    reason = _problem()
  if reason:
    raise NotImplementedError(reason)


def status() -> str:
  """Returns in words whether there is a library, which is made if need be."""
  with _lock:
    return _problem() or f'compiled for this CPU, {_path()}'


def prepare() -> None:
  """Compiles a library that is not there in a thread; `check` waits for it."""
  if not _path().exists():
    threading.Thread(target=status, daemon=True).start()


@functools.cache
def digest() -> str:
  """Returns the hash of what the library is made of."""
  parts = [str(_command()), jaxlib.__version__, _cpu()]
  parts += [path.read_text() for path in _sources()]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]


@functools.cache
def _problem() -> str | None:
  """Loads the library; returns why that cannot be done, None if it can."""
  try:
    if not _path().exists():
      _compile()
    loaded = ctypes.CDLL(str(_path()))
  except OSError as error:
    reason = f'the native kernels cannot be loaded: {error}'
  except _CompileError as error:
    reason = str(error)
  else:
    for handler in HANDLERS:
      jax.ffi.register_ffi_target(
        _target(handler),
        jax.ffi.pycapsule(getattr(loaded, handler)),
        platform='cpu',
      )
    return None
  logging.warning('CPUs take XLA alone: %s.', reason)
  return reason


class _CompileError(Exception):
  """There is no library, for the reason it says."""


def _compile() -> None:
  """Compiles the library into the cache folder."""
  compiler, *flags = _command()
  if shutil.which(compiler) is None:
    raise _CompileError(f'there is no C++ compiler {compiler!r}; {REMEDY}')
  folder = _path().parent
  folder.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(folder / 'lock'):
    if _path().exists():  # another process has compiled it meanwhile
      return
    logging.warning(
      'Compiling the kernels for this CPU with %s, once.', compiler
    )
    with tempfile.TemporaryDirectory(dir=folder) as directory:
      sources = _sources('*.cc')
      objects = [pathlib.Path(directory, f'{i}.o') for i in range(len(sources))]
      with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [
          pool.submit(_run, compiler, *flags, '-c', source, '-o', made)
          for source, made in zip(sources, objects, strict=True)
        ]:
          done.result()
      partial = pathlib.Path(directory, 'partial.so')
      _run(compiler, *flags, '-shared', *objects, '-o', partial)
      os.replace(partial, _path())


def _run(compiler: str, *arguments: str | os.PathLike) -> None:
  """Runs the compiler.

  Raises:
    _CompileError: it cannot do that.
  """
  done = subprocess.run(
    [compiler, *arguments],
    check=False,
    capture_output=True,
    text=True,
    timeout=_SECONDS,
  )
  if done.returncode:
    said = [x for x in done.stderr.splitlines() if 'error' in x]
    raise _CompileError(
      f'{compiler} cannot compile them ({" ".join(said[:1])[:200]}); it has to '
      'know C++17, as GCC 12 and Clang 14 do'
    )


def _command() -> list[str]:
  """Returns the compiler and its flags."""
  is_intel = platform.machine() in _INTEL
  return [
    os.environ.get('CXX', 'c++'),
    *_FLAGS,
    '-march=native' if is_intel else '-mcpu=native',
    f'-I{_HERE}',
    '-isystem',
    jax.ffi.include_dir(),
  ]


def _path() -> pathlib.Path:
  return user_cache.cache_dir() / 'native' / f'{digest()}.so'


def _target(handler: str) -> str:
  # With the hash, as compiled programs are kept, too.
  return f'swiftspec_{handler}_{digest()}'


def _sources(*patterns: str) -> list[pathlib.Path]:
  patterns = patterns or ('*.cc', '*.h')
  root = _HERE.parent
  return sorted(path for x in patterns for path in root.glob(f'*/{x}'))


def _cpu() -> str:
  """Returns the model and the instructions of the CPU, in words."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = []
  names = ('model name', 'flags', 'Features', 'CPU part')
  known = {line for line in lines if line.startswith(names)}
  return '\n'.join([platform.machine(), platform.processor(), *sorted(known)])
