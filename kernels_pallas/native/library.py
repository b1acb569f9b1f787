"""The libraries of native kernels: compiled once, then loaded.

`$CXX`, by default `c++`, compiles one for this very CPU when a kernel of it is
first wanted. It is kept in the cache folder. Its name has the hash of all that
it is made of: sources, flags, CPU and jaxlib.

What is called NAME-3-8 is the library NAME with no formats but 3 and 8.
"""

import collections
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
from typing import Any

import filelock
import jax
import jaxlib
from absl import logging

from kernels_pallas import user_cache

# Functions of each library, targets of `jax.ffi`. The source is NAME.cc.
HANDLERS = {
  'few_rows': ('few_rows_float32', 'few_rows_bfloat16', 'few_rows_int8'),
  'attention': (
    'kv_commit',
    'norm_heads',
    'rotate_and_write',
    'attention',
  ),
  'gguf_blocks': ('gguf_multiply', 'gguf_take'),
}
REMEDY = (
  'install one (on Debian and Ubuntu: apt install g++; on macOS: xcode-select '
  '--install), or name it in CXX'
)
_FLAGS = ('-O2', '-std=c++17', '-ffp-contract=off', '-fPIC', '-pthread')
_HERE = pathlib.Path(__file__).parent
_SECONDS = 300
_INTEL = ('x86_64', 'AMD64')
_locks = collections.defaultdict[str, threading.Lock](threading.Lock)


def call(
  handler: str,
  results: Any,
  *arrays: jax.Array,
  name: str | None = None,
  in_place: dict[int, int] | None = None,
  **attributes: Any,
) -> Any:
  """Returns what one of `HANDLERS` makes of arrays, on XLA's CPU backend.

  Args:
    handler: name of the function.
    results: jax.ShapeDtypeStruct of each result.
    *arrays: arguments.
    name: name of its library, if that has not all formats.
    in_place: number of the result that takes the memory of an argument, by the
      number of the argument.
    **attributes: what the function has beside them, in NumPy's types.

  Raises:
    NotImplementedError: there is no library, see `check`.
  """
  if name is None:
    name = next(name for name in HANDLERS if handler in HANDLERS[name])
  check(name)
  target = jax.ffi.ffi_call(
    _target(name, handler), results, input_output_aliases=in_place
  )
  return target(*arrays, **attributes)


def check(name: str) -> None:
  """Loads a library, one of `HANDLERS`, with all formats or some.

  Raises:
    NotImplementedError: it cannot be compiled, with the reason and the remedy.
  """
  with _locks[name]:
    reason = _problem(name)
  if reason:
    raise NotImplementedError(reason)


def status() -> str:
  """Returns in words whether there are libraries; makes those that are not."""
  for name in HANDLERS:
    try:
      check(name)
    except NotImplementedError as error:
      return str(error)
  return f'compiled for this CPU, in {_path(name).parent}'


def prepare(name: str) -> None:
  """Compiles a library that is not there in a thread; `check` waits for it."""

  def load():
    with _locks[name]:
      _problem(name)

  if not _path(name).exists():
    threading.Thread(target=load, daemon=True).start()


@functools.cache
def digest(name: str | None = None) -> str:
  """Returns the hash of what a library is made of, or all of them are."""
  parts = [str(_command(name or '')), jaxlib.__version__, _cpu()]
  pattern = f'{_split(name)[0]}.cc' if name else '*.cc'
  parts += [path.read_text() for path in sorted(_HERE.glob('*.h'))]
  parts += [path.read_text() for path in sorted(_HERE.glob(pattern))]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]


@functools.cache
def _problem(name: str) -> str | None:
  """Loads a library; returns why that cannot be done, None if it can."""
  try:
    if not _path(name).exists():
      _compile(name)
    loaded = ctypes.CDLL(str(_path(name)))
  except OSError as error:
    reason = f'the native kernels cannot be loaded: {error}'
  except _CompileError as error:
    reason = str(error)
  else:
    for handler in HANDLERS[_split(name)[0]]:
      jax.ffi.register_ffi_target(
        _target(name, handler),
        jax.ffi.pycapsule(getattr(loaded, handler)),
        platform='cpu',
      )
    return None
  logging.warning('CPUs take XLA alone: %s.', reason)
  return reason


class _CompileError(Exception):
  """There is no library, for the reason it says."""


def _compile(name: str) -> None:
  """Compiles a library into the cache folder."""
  source, _ = _split(name)
  compiler, *flags = _command(name)
  if shutil.which(compiler) is None:
    raise _CompileError(f'there is no C++ compiler {compiler!r}; {REMEDY}')
  path = _path(name)
  path.parent.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(path.with_suffix('.lock')):
    if path.exists():  # another process has compiled it meanwhile
      return
    logging.warning(
      'Compiling the kernels of %s for this CPU with %s, once.',
      source,
      compiler,
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
      partial = pathlib.Path(directory, 'partial.so')
      _run(compiler, *flags, '-shared', _HERE / f'{source}.cc', '-o', partial)
      os.replace(partial, path)


def _run(compiler: str, *arguments: str | os.PathLike) -> None:
  """Runs the compiler.

  Raises:
    _CompileError: it cannot do that.
  """
  try:
    done = subprocess.run(
      [compiler, *arguments],
      check=False,
      capture_output=True,
      text=True,
      timeout=_SECONDS,
    )
  except subprocess.TimeoutExpired as error:
    raise _CompileError(
      f'{compiler} took more than {_SECONDS} s; start again to try once more'
    ) from error
  if done.returncode:
    said = [x for x in done.stderr.splitlines() if 'error' in x]
    raise _CompileError(
      f'{compiler} cannot compile them ({" ".join(said[:1])[:200]}); it has to '
      'know C++17, as GCC 12 and Clang 14 do'
    )


def _split(name: str) -> tuple[str, list[str]]:
  """Returns the source of a library, and its formats; none stand for all."""
  source, *formats = name.split('-')
  return source, formats


def _command(name: str) -> list[str]:
  """Returns the compiler and its flags."""
  is_intel = platform.machine() in _INTEL
  _, formats = _split(name)
  return [
    os.environ.get('CXX', 'c++'),
    *_FLAGS,
    '-march=native' if is_intel else '-mcpu=native',
    f'-I{_HERE}',
    '-isystem',
    jax.ffi.include_dir(),
    *([f'-DNATIVE_KINDS={",".join(formats)}'] if formats else []),
  ]


def _path(name: str) -> pathlib.Path:
  folder = user_cache.cache_dir() / 'native'
  return folder / f'{name}-{digest(name)}.so'


def _target(name: str, handler: str) -> str:
  # With the hash, as compiled programs are kept, too.
  return f'swiftspec_{handler}_{digest(name)}'


def _cpu() -> str:
  """Returns the model and the instructions of the CPU, in words."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = []
  names = ('model name', 'flags', 'Features', 'CPU part')
  known = {line for line in lines if line.startswith(names)}
  return '\n'.join([platform.machine(), platform.processor(), *sorted(known)])
