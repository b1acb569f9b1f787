"""Which of the kernels' shapes are measured, the most valuable first."""

import functools
import itertools
from collections.abc import Iterator

import jax

from experiments.kernels import kernel_cases, kernel_timing
from experiments.kernels.kernel_cases import Case

_MODELS = ('llama-8b', 'smollm2-135m', 'llama-1b')
_MOST_VALUABLE_TOKENS = 8  # a round of a tree
REPEATS = 5
_TINY_KERNEL = 'swiglu'  # quick in the interpreter


def chosen_cases(*, tiny: bool) -> list[Case]:
  """Returns the shapes of some models on one device, kernels in turn.

  Args:
    tiny: only the smallest one of one kernel.
  """
  if tiny:
    found = kernel_cases.cases(_TINY_KERNEL)
    return [min(found, key=lambda case: case.num_bytes)]
  turns = itertools.zip_longest(*map(_of_kernel, kernel_cases.KERNELS))
  return [case for turn in turns for case in turn if case is not None]


def _of_kernel(kernel: str) -> Iterator[Case]:
  found = list(kernel_cases.cases(kernel))
  for model in _MODELS:
    own = [case for case in found if _is_of(case, model)]
    found = [case for case in found if case not in own]
    yield from sorted(own, key=_distance)


def _is_of(case: Case, model: str) -> bool:
  # The vocabulary of a model is never shared there.
  name = case.spec.name
  users = name.partition(' ')[0].split('+')
  return any(
    user == model or f'{user}/'.startswith(f'{model}/tp1/') for user in users
  )


def _distance(case: Case) -> int:
  tokens = getattr(case.spec, 'num_tokens', _MOST_VALUABLE_TOKENS)
  return abs(tokens - _MOST_VALUABLE_TOKENS)


@functools.cache
def bandwidth() -> float:
  """Returns the bytes per second that the device reads."""
  is_cpu = jax.default_backend() == 'cpu'
  return kernel_timing.read_bandwidth(2**24 if is_cpu else 2**30, REPEATS)


def make_sets(case: Case, prepare=lambda *arrays: arrays) -> list:
  """Returns several sets of arguments, too large for caches together."""
  count = kernel_timing.num_sets(case.num_bytes)
  keys = jax.random.split(jax.random.key(0), count)
  return [prepare(*case.make_arrays(key)) for key in keys]
