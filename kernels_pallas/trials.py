"""Kernels prove themselves on a device before 'auto' takes them.

A kernel is compared with its reference in a child process, once for a kind of
device, its driver, the version of JAX, the kernel's source and a class of
shapes. The verdict is kept as a file in the cache folder. Kernels for CPUs are
compared in this process, which is quicker.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
from typing import Any

import filelock
import jax
import jaxlib
from absl import logging
from jax.sharding import Sharding

from kernels_pallas import (
  comparison,
  dispatch,
  trial_child,
  tuning,
  user_cache,
)
from kernels_pallas.call_spec import CallSpec
from kernels_pallas.dispatch import Verdict

SECONDS = 60.0  # that a kernel may take, to compile and to run
# Of these a second process cannot open a device that is in use.
EXCLUSIVE_PLATFORMS = ('tpu',)
_HOW_TO = (
  'run `python -m experiments.kernels check` while no other program uses the '
  'device'
)
_CHILD = trial_child.Child()


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
    if self.implementation == 'native':
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
) -> Verdict:
  """Returns the verdict on a kernel; compares it if there is none yet.

  Args:
    kernel: name of the kernel.
    spec: shapes, dtypes and options of the call on one device.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.
    implementation: one of `dispatch.IMPLEMENTATIONS` that is a kernel.
  """
  device = dispatch.device_of(sharding)
  if not _is_here(device):
    return Verdict(True, 'compiled for devices that are not here')
  if jax.process_count() > 1:
    return _uncompared('several processes could decide differently')
  trial = _trial(kernel, spec, implementation, device)
  path = trial.path()
  try:
    _, known = _read(path)
    if known is None:
      with _locked():
        # Another process may have compared it meanwhile.
        _, known = _read(path)
        if known is None and device.platform in EXCLUSIVE_PLATFORMS:
          known = _keep(trial, _uncompared(_HOW_TO))
        elif known is None:
          known = _check(trial)
  except OSError as error:
    return _uncompared(
      f'verdicts cannot be kept ({error}); set SWIFTSPEC_CACHE to a directory '
      'that you can write to'
    )
  return known


def keep(
  kernel: str,
  spec: CallSpec,
  implementation: str,
  found: comparison.Comparison,
) -> None:
  """Keeps what a comparison in this process has found on JAX's own device.

  Args:
    kernel: name of the kernel.
    spec: shapes, dtypes and options of the call.
    implementation: one of `dispatch.IMPLEMENTATIONS` that is a kernel.
    found: result of `comparison.compare`.
  """
  trial = _trial(kernel, spec, implementation, dispatch.device_of(None))
  try:
    with _locked():
      _keep(trial, _verdict_of(found))
  except OSError as error:
    logging.warning('The verdict on %s cannot be kept: %s', kernel, error)


def _trial(kernel, spec, implementation, device) -> Trial:
  if implementation == 'native':
    spec = spec.small()
  return Trial(
    kernel=kernel,
    implementation=implementation,
    spec=spec,
    device_kind=device.device_kind,
    driver=comparison.driver_of(device),
  )


def _uncompared(reason: str) -> Verdict:
  detail = f'has not been compared with the reference: {reason}'
  return Verdict(False, detail, is_compared=False)


def check_uncompared() -> list[tuple[Trial, Verdict]]:
  """Compares what could not be compared when it was wanted.

  The device must be free: this process does not use it.
  """
  found = []
  for path in sorted(folder().glob('*.json')):
    request, known = _read(path)
    trial = None if known is None or known.is_compared else _trial_of(request)
    if trial is not None and trial.path() == path:
      with _locked():
        found.append((trial, _check(trial)))
  _CHILD.end()
  return found


def _trial_of(request: dict[str, Any]) -> Trial | None:
  """Returns the trial of a file, None if another version has written it."""
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


def _read(path: pathlib.Path) -> tuple[dict[str, Any], Verdict | None]:
  """Returns request and verdict of a file, none if it is missing or damaged."""
  try:
    row = json.loads(path.read_text())
    return row.pop('trial'), Verdict(**row)
  except (FileNotFoundError, KeyError, TypeError, ValueError):
    return {}, None


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


def _check(trial: Trial) -> Verdict:
  """Compares a kernel and keeps the verdict."""
  logging.warning(
    'Comparing %s of %s with its reference, once for this device.',
    trial.implementation,
    trial.kernel,
  )
  if trial.implementation == 'native':
    return _keep(trial, _verdict_of(_compare_here(trial)))
  return _keep(trial, _judge(*_CHILD.compare(trial.request(), SECONDS)))


def _compare_here(trial: Trial) -> comparison.Comparison:
  """Returns the comparison, made by a thread that is not tracing a program."""

  def compare():
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      return comparison.compare(trial.kernel, trial.implementation, trial.spec)

  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(compare).result()


def _judge(said: dict[str, Any] | None, end: str) -> Verdict:
  """Returns the verdict.

  Args:
    said: fields of a `Comparison`: None before the reference has run, then
      empty before the comparison is made.
    end: end of the child, in words.
  """
  if said is None:
    return _uncompared(f'before it, the child process {end}; {_HOW_TO}')
  if not said:
    return Verdict(False, f'{end}, when it was compared with the reference')
  return _verdict_of(comparison.Comparison(**said))


def _verdict_of(found: comparison.Comparison) -> Verdict:
  error, tolerance = found.max_error, found.tolerance
  if found.is_same:
    return Verdict(True, f'agrees with the reference within {error:.1e}')
  return Verdict(
    False,
    f'differs from the reference by {error:.1e} of its largest number, more '
    f'than {tolerance:.1e}',
  )
