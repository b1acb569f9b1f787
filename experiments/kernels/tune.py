"""The best tiles of kernels on the device at hand."""

import contextlib
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from experiments.kernels import kernel_timing
from experiments.kernels.kernel_cases import Case
from kernels_pallas import comparison, tuning
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files

_LEAST_GAIN = 1.03  # what times vary by


def run(cases: Sequence[Case], repeats: int, path: pathlib.Path) -> None:
  """Times the tiles, and adds the best ones to a file.

  Args:
    cases: kernels and their arguments.
    repeats: measurements of each, of which the median counts.
    path: path of the file.

  Raises:
    UserError: the device has no tiles, or the file holds something else.
  """
  platform = jax.default_backend()
  if platform == 'cpu':
    raise errors.UserError(
      'kernels for a cpu have no tiles, so there is nothing to tune; run this '
      'on a GPU or TPU'
    )
  known = read_entries(path)
  jobs = [
    (case, implementation, call)
    for case in cases
    for implementation, call in case.kernels(platform)
  ]
  for case, implementation, call in tqdm.tqdm(
    jobs, desc='tuning', unit='kernel', disable=None
  ):
    configs = list(candidates(case.kernel, implementation))
    entry = tune(case, implementation, call, configs, repeats)
    tqdm.tqdm.write(
      f'{case.kernel} {case.spec.name} {implementation}: {_words(entry)}'
    )
    if entry is not None:
      known = add_entry(path, entry)
  print(f'{len(known)} entries in {path}; {tuning.VARIABLE}={path} uses them')


def read_entries(path: pathlib.Path) -> dict[tuple[str, ...], tuning.Entry]:
  """Returns the entries of a file by their keys, none if there is no file.

  Raises:
    UserError: it holds something else.
  """
  if not path.exists():
    return {}
  failed = f'--output={path} has no entries that can be added to: '
  with errors.explained(failed, (OSError, ValueError)):
    return {entry.key: entry for entry in tuning.read(path)}


def add_entry(
  path: pathlib.Path, entry: tuning.Entry
) -> dict[tuple[str, ...], tuning.Entry]:
  """Adds an entry to those of a file, and returns all of them."""
  known = read_entries(path) | {entry.key: entry}
  output_files.write(path, tuning.dump(list(known.values())).encode())
  return known


def _words(entry: tuning.Entry | None) -> str:
  if entry is None:
    return 'the defaults are the best'
  gain = entry.default_seconds / entry.seconds
  return f'{entry.seconds * 1e6:.1f} us, {gain:.2f}x, {entry.config}'


def candidates(kernel: str, implementation: str) -> Iterator[Any]:
  """Yields the tiles to try, those that the kernel's `Config` accepts."""
  make = tuning.config_class(kernel, implementation)
  values = make.candidates()
  for combination in itertools.product(*values.values()):
    with contextlib.suppress(ValueError):
      yield make(**dict(zip(values, combination, strict=True)))


def tune(
  case: Case,
  implementation: str,
  call: Callable[..., Any],
  configs: Iterable[Any],
  repeats: int,
) -> tuning.Entry | None:
  """Returns the best tiles of a kernel at a shape; None is the defaults.

  Args:
    case: the kernel and its arguments.
    implementation: implementation of `call`.
    call: the kernel, which takes `config`.
    configs: configurations to try; those that the device refuses are left
      out.
    repeats: measurements of each.
  """
  options = case.spec.options()
  default_seconds, want = _measure(case, call, options, repeats)
  best = None
  for config in configs:
    try:
      seconds, got = _measure(
        case, call, {**options, 'config': config}, repeats
      )
    # What compilers and the lowering of kernels raise.
    except (LookupError, RuntimeError, TypeError, ValueError):
      continue
    limit = default_seconds / _LEAST_GAIN if best is None else best.seconds
    if seconds >= limit:
      continue
    if not comparison.compare_results(case.spec, got, want).is_same:
      continue
    best = tuning.Entry(
      kernel=case.kernel,
      implementation=implementation,
      device_kind=jax.devices()[0].device_kind,
      shapes=tuning.shapes_of(case.spec.arrays()),
      config=config,
      seconds=seconds,
      default_seconds=default_seconds,
    )
  return best


def _measure(case, call, options, repeats) -> tuple[float, list[np.ndarray]]:
  """Returns the seconds of a call, and what it gives."""
  donated = case.spec.DONATED
  program = jax.jit(functools.partial(call, **options), donate_argnums=donated)
  sets = case.make_sets()
  results = program(*sets[0])
  values = [np.array(x) for x in jax.tree.leaves(results)]
  sets[0] = kernel_timing.taken_back(sets[0], results, donated)
  seconds = kernel_timing.seconds_of(program, sets, repeats, donated)
  return seconds, values
