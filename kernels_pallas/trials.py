"""Kernels prove themselves on a device before 'auto' takes them.

A kernel is compared with its reference in a child process, once for a kind of
device, its driver, the version of JAX, the kernel's source and a class of
shapes. The verdict is kept as a file in the cache folder. Kernels for CPUs are
compared in this process, which is quicker.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import filelock
import jax
import jaxlib
from absl import logging
from jax.sharding import Sharding

from kernels_pallas import comparison, dispatch, tuning, user_cache
from kernels_pallas.call_spec import CallSpec
from kernels_pallas.dispatch import Verdict

SECONDS = 60.0
_SECONDS_BEFORE_KERNEL = 60.0  # to open the device and to run the reference
_POLL_SECONDS = 0.05
# Of these a second process cannot open a device that is in use.
EXCLUSIVE_PLATFORMS = ('tpu',)
_HOW_TO = (
  'run `python -m experiments.check_kernels` while no other program uses the '
  'device'
)
_CHILD_SETTINGS = {
  # The parent may hold most of the memory.
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
  'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform',
  # The last line of a traceback is then the error.
  'JAX_TRACEBACK_FILTERING': 'off',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """A kernel to compare with its reference.

  Attributes:
    kernel: name of the kernel.
    implementation: one of `dispatch.IMPLEMENTATIONS` that is a kernel.
    spec: shapes, dtypes and options of the call.
    device_kind: JAX's name of the device's kind.
    driver: versions of what runs programs on the device.
  """

  kernel: str
  implementation: str
  spec: CallSpec
  device_kind: str
  driver: str

  def request(self) -> dict[str, Any]:
    """Returns it in the form of JSON."""
    return {**dataclasses.asdict(self), 'package': self.spec.package}

  def path(self) -> pathlib.Path:
    """Returns where the verdict is kept."""
    tiles = tuning.measured(
      self.kernel, self.implementation, self.device_kind, self.spec.arrays()
    )
    shape = self.spec.shape_class()
    if self.implementation == 'native':  # the same code for all shapes
      shape = {k: v for k, v in shape.items() if k.endswith('dtype')}
    key = {
      **self.request(),
      'spec': shape,
      'tiles': repr(tiles),
      'jax': [jax.__version__, jaxlib.__version__],
      'source': _source_hash(self.spec.package),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
    name = f'{self.kernel}-{self.implementation}-{digest.hexdigest()[:16]}'
    return folder() / f'{name}.json'


_ROW = {'trial', *(field.name for field in dataclasses.fields(Verdict))}


def folder() -> pathlib.Path:
  """Returns the folder of the verdicts, which may not exist yet."""
  return user_cache.cache_dir() / 'kernel_verdicts'


@functools.cache
def _source_hash(package: str) -> str:
  """Returns the hash of a kernel's folder and of all kernels: they share."""
  spec = importlib.util.find_spec(package)
  own, shared = pathlib.Path(spec.origin).parent, pathlib.Path(__file__).parent
  digest = hashlib.sha256()
  for path in sorted({*own.glob('*.py'), *shared.rglob('*.py')}):
    digest.update(path.read_bytes())
  return digest.hexdigest()


def verdict(
  kernel: str,
  spec: CallSpec,
  sharding: Sharding | None,
  implementation: str,
  *,
  seconds: float = SECONDS,
) -> Verdict:
  """Returns the verdict on a kernel; compares it if there is none yet.

  Args:
    kernel: name of the kernel.
    spec: shapes, dtypes and options of the call on one device.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.
    implementation: one of `dispatch.IMPLEMENTATIONS` that is a kernel.
    seconds: most seconds that the kernel may take, to compile and to run.
  """
  device = dispatch.device_of(sharding)
  if not _is_here(device):
    return Verdict(True, 'compiled for devices that are not here')
  if jax.process_count() > 1:
    return _uncompared('several processes could decide differently')
  trial = Trial(
    kernel=kernel,
    implementation=implementation,
    spec=spec,
    device_kind=device.device_kind,
    driver=comparison.driver_of(device),
  )
  path = trial.path()
  try:
    known = _read(path)
    if known is None:
      with _locked():
        # Another process may have compared it meanwhile.
        known = _read(path)
        if known is None and device.platform in EXCLUSIVE_PLATFORMS:
          known = _keep(trial, _uncompared(_HOW_TO))
        elif known is None:
          known = _check(trial, seconds)
  except OSError as error:
    return _uncompared(
      f'verdicts cannot be kept ({error}); set SWIFTSPEC_CACHE to a directory '
      'that you can write to'
    )
  return known


def _uncompared(reason: str) -> Verdict:
  detail = f'has not been compared with the reference: {reason}'
  return Verdict(False, detail, is_compared=False)


def check_uncompared() -> list[tuple[Trial, Verdict]]:
  """Compares what could not be compared when it was wanted.

  The device must be free: this process does not use it.
  """
  found = []
  for path in sorted(folder().glob('*.json')):
    row = _row(path)
    trial = None if row is None or row['is_compared'] else _trial_of(row)
    if trial is not None and trial.path() == path:
      with _locked():
        found.append((trial, _check(trial, SECONDS)))
  return found


def _trial_of(row: dict[str, Any]) -> Trial | None:
  """Returns the trial of a file, None if another version has written it."""
  request = {**row['trial']}
  try:
    spec = comparison.load_spec(request.pop('package'), request['spec'])
    return Trial(**{**request, 'spec': spec})
  except (ImportError, KeyError, TypeError):
    return None


def _is_here(device: jax.Device) -> bool:
  """Whether it is one of this process, and not only of a compiler."""
  try:
    return device in jax.devices(device.platform)
  except RuntimeError:  # no such platform
    return False


def _locked() -> filelock.FileLock:
  folder().mkdir(parents=True, exist_ok=True)
  return filelock.FileLock(folder() / 'lock')


def _row(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns the content of a file, None if it is missing or damaged."""
  try:
    row = json.loads(path.read_text())
    return row if set(row) == _ROW else None
  except (FileNotFoundError, TypeError, ValueError):
    return None


def _read(path: pathlib.Path) -> Verdict | None:
  row = _row(path)
  return row and Verdict(row['is_good'], row['detail'], row['is_compared'])


def _keep(trial: Trial, found: Verdict) -> Verdict:
  path = trial.path()
  row = {'trial': trial.request(), **dataclasses.asdict(found)}
  partial = path.with_suffix('.partial')
  partial.write_text(json.dumps(row, indent=2) + '\n')
  os.replace(partial, path)
  if not found.is_good:
    logging.warning(
      'No %s for %s of %s: it %s.',
      trial.implementation,
      trial.kernel,
      trial.spec.name,
      found.detail,
    )
  return found


def _check(trial: Trial, seconds: float) -> Verdict:
  """Compares a kernel and keeps the verdict."""
  logging.warning(
    'Comparing %s of %s with its reference, once for this device.',
    trial.implementation,
    trial.kernel,
  )
  if trial.implementation == 'native':
    return _keep(trial, _judge(_compare_here(trial), ''))
  with tempfile.TemporaryDirectory() as directory:
    result = pathlib.Path(directory, 'result.json')
    log = pathlib.Path(directory, 'log')
    request = json.dumps(trial.request())
    with log.open('wb') as output:
      process = subprocess.Popen(
        [sys.executable, '-m', comparison.__name__, request, str(result)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={
          **os.environ,
          **_CHILD_SETTINGS,
          'PYTHONPATH': os.pathsep.join(sys.path),
        },
        start_new_session=True,
      )
      end = _end(process, result, seconds)
    said = json.loads(result.read_text()) if result.exists() else None
    complaints = log.read_text(errors='replace').splitlines()
  if complaints:
    end += f': {complaints[-1][:200]}'
  return _keep(trial, _judge(said, end))


def _compare_here(trial: Trial) -> dict[str, Any]:
  """Returns the comparison, made by a thread that is not tracing a program."""

  def compare():
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      return comparison.compare(trial.kernel, trial.implementation, trial.spec)

  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return dataclasses.asdict(thread.submit(compare).result())


def _end(
  process: subprocess.Popen, result: pathlib.Path, seconds: float
) -> str:
  """Waits, ends what takes too long, and returns how the process has ended."""
  deadline = time.monotonic() + _SECONDS_BEFORE_KERNEL
  is_kernel = False
  try:
    while process.poll() is None:
      if not is_kernel and result.exists():
        is_kernel, deadline = True, time.monotonic() + seconds
      if time.monotonic() > deadline:
        limit = seconds if is_kernel else _SECONDS_BEFORE_KERNEL
        return f'took more than {limit:g} s'
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_SECONDS)
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  status = process.returncode
  if status < 0:
    return f'crashed by {signal.Signals(-status).name}'
  return f'failed with status {status}'


def _judge(said: dict[str, Any] | None, end: str) -> Verdict:
  """Returns the verdict.

  Args:
    said: output of the child: None before the reference has run, then empty
      before the comparison is made.
    end: end of the child, in words.
  """
  if said is None:
    return _uncompared(f'before it, the child process {end}; {_HOW_TO}')
  if not said:
    return Verdict(False, f'{end}, when it was compared with the reference')
  error, tolerance = said['max_error'], said['tolerance']
  if said['is_same']:
    return Verdict(True, f'agrees with the reference within {error:.1e}')
  return Verdict(
    False,
    f'differs from the reference by {error:.1e} of its largest number, more '
    f'than {tolerance:.1e}',
  )
