"""Compares a kernel with its reference on the device at hand.

As a program, `python -m kernels_pallas.comparison`, it is the child process of
`trials`, because a bad kernel may end its process or hang.
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kernels_pallas import tuning
from kernels_pallas.call_spec import CallSpec
from kernels_pallas.native import library

_MOST_SECONDS = 300
IDLE_SECONDS = 60  # that the program waits for another kernel
_NVIDIA = pathlib.Path('/proc/driver/nvidia/version')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """How far results are from those of the reference.

  Attributes:
    max_error: the largest, as a share of the largest number of its array.
    tolerance: the largest that is allowed for any of the arrays.
    is_same: whether each array keeps what is allowed for its dtype.
  """

  max_error: float
  tolerance: float
  is_same: bool


def compare(
  kernel: str,
  implementation: str,
  spec: CallSpec,
  *,
  before_kernel: Callable[[], None] = lambda: None,
) -> Comparison:
  """Runs a kernel and its reference with the same random arguments.

  Args:
    kernel: name of the kernel's package, and of the function in its modules.
    implementation: name of the module to compare with the reference.
    spec: shapes, dtypes and options of the call.
    before_kernel: function that is called when the reference has run.
  """
  call = _function(kernel, implementation, spec)
  call = tuning.tuned(kernel, implementation, call)
  return compare_call(kernel, call, spec, before_kernel=before_kernel)


def compare_call(
  kernel: str,
  call: Callable[..., Any],
  spec: CallSpec,
  *,
  before_kernel: Callable[[], None] = lambda: None,
) -> Comparison:
  """Runs a call and the reference of a kernel with the same random arguments.

  The reference multiplies in full precision, which is not XLA's default for
  float32 on accelerators.

  Args:
    kernel: name of the kernel.
    call: jittable function of the arrays of `spec`.
    spec: shapes, dtypes and options of the call.
    before_kernel: function that is called when the reference has run.
  """
  key = jax.random.key(0, impl='rbg')  # three times faster to compile

  def results(call):
    program = jax.jit(call)
    return [
      np.asarray(x)
      for arrays in spec.draws(key)
      for x in jax.tree.leaves(program(*arrays))
    ]

  with jax.default_matmul_precision('highest'):
    want = results(_function(kernel, 'reference', spec))
  before_kernel()
  return compare_results(spec, results(call), want)


def _function(kernel, name, spec):
  """Returns a call of the kernel's function in a module of its package."""
  module = importlib.import_module(f'{spec.package}.{name}')
  return functools.partial(getattr(module, kernel), **spec.options())


def compare_results(
  spec: CallSpec, got: Sequence[np.ndarray], want: Sequence[np.ndarray]
) -> Comparison:
  """Compares arrays by the `TOLERANCES` of the kernel's reference."""
  tolerances = importlib.import_module(f'{spec.package}.reference').TOLERANCES
  errors = [_error(*pair) for pair in zip(got, want, strict=True)]
  allowed = [tolerances.get(x.dtype.name, 0.0) for x in want]
  return Comparison(
    max_error=max(errors),
    tolerance=max(allowed),
    is_same=all(e <= a for e, a in zip(errors, allowed, strict=True)),
  )


def _error(got, want) -> float:
  if (got.shape, got.dtype) != (want.shape, want.dtype):
    return math.inf
  # Integers are exact in float64, too.
  got, want = got.astype(np.float64), want.astype(np.float64)
  differs = got != want
  if not differs.any():
    return 0.0
  largest = np.abs(want[np.isfinite(want)]).max(initial=0)
  distance = np.abs(got[differs] - want[differs]).max()
  error = distance / largest if largest else math.inf
  return math.inf if math.isnan(error) else float(error)


def driver_of(device: jax.Device) -> str:
  """Returns the versions of what runs programs on a device."""
  versions = device.client.platform_version
  if device.platform == 'gpu' and _NVIDIA.exists():
    versions += ' ' + _NVIDIA.read_text().partition('\n')[0]
  if device.platform == 'cpu':
    versions += ' ' + library.digest()
  return ' '.join(versions.split())


def load_spec(package: str, fields: dict[str, Any]) -> CallSpec:
  """Returns the spec of these fields of a kernel's package."""
  return importlib.import_module(f'{package}.arg_specs').ArgSpec(**fields)


def _main() -> None:
  """Compares one kernel after the other, as the lines of the input say.

  It ends with the input, with a kernel that fails, and if nobody asks.
  """
  signal.alarm(IDLE_SECONDS)
  for line in sys.stdin:
    request = json.loads(line)
    # If the parent is killed, nobody else ends a kernel that hangs.
    signal.alarm(_MOST_SECONDS)
    _answer(request['trial'], pathlib.Path(request['path']))
    signal.alarm(IDLE_SECONDS)


def _answer(trial: dict[str, Any], path: pathlib.Path) -> None:
  """Writes to `path` that the reference has run, and then the comparison."""

  def write(**fields):
    partial = path.with_suffix('.partial')
    partial.write_text(json.dumps(fields))
    os.replace(partial, path)

  wanted = (trial['device_kind'], trial['driver'])
  found = [(x.device_kind, driver_of(x)) for x in jax.local_devices()]
  if wanted not in found:
    raise SystemExit(f'its device is {wanted}, and here are {found}')
  with jax.default_device(jax.local_devices()[found.index(wanted)]):
    comparison = compare(
      trial['kernel'],
      trial['implementation'],
      load_spec(trial['package'], trial['spec']),
      before_kernel=write,
    )
  write(**dataclasses.asdict(comparison))


if __name__ == '__main__':
  _main()
