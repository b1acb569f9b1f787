"""Which of the kernels' shapes are measured, the most valuable first."""

import functools
import itertools
from collections.abc import Iterable, Iterator

import jax

from experiments.kernels import kernel_cases, kernel_timing
from experiments.kernels.kernel_cases import Case

# Dense layers, sinks and experts in MXFP4, windows, experts in int4 and float8.
_MODELS = (
  'llama-8b',
  'gpt-oss-20b',
  'gemma3-4b',
  'smollm2-135m',
  'qwen3-30b-a3b',
  'llama-1b',
  'qwen3-235b-a22b',
)
_MOST_VALUABLE_TOKENS = 8  # a round of a tree
REPEATS = 5
_TINY_KERNEL = 'swiglu'  # quick in the interpreter
# All but those that CPUs alone have.
KERNELS = tuple(
  kernel
  for kernel, (_, backends) in kernel_cases.KERNELS.items()
  if set(backends) != {'native'}
)


def chosen_cases(*, tiny: bool, long_first: bool = False) -> list[Case]:
  """Returns the shapes of some models on one device, kernels in turn.

  Args:
    tiny: only the smallest one of one kernel.
    long_first: whether long contexts, which take long to compare but tell most
      about speed, come before short ones.
  """
  if tiny:
    found = kernel_cases.cases(_TINY_KERNEL)
    return [min(found, key=lambda case: case.spec.num_bytes)]
  return list(_in_turn(_of_kernel(kernel, long_first) for kernel in KERNELS))


def _of_kernel(kernel: str, long_first: bool) -> Iterator[Case]:
  """Yields shapes of each model, dtype of weights and window in turn."""
  found = list(kernel_cases.cases(kernel))
  kinds: dict[tuple, list[Case]] = {}
  for model in _MODELS:
    own = [case for case in found if _is_of(case, model)]
    found = [case for case in found if case not in own]
    if long_first:
      own.sort(key=lambda case: -getattr(case.spec, 'context', 0))
    for case in sorted(own, key=_rank):
      kinds.setdefault((model, *_kind(case)), []).append(case)
  return _in_turn(kinds.values())


def _in_turn(queues: Iterable[Iterable[Case]]) -> Iterator[Case]:
  turns = itertools.zip_longest(*queues)
  return (case for turn in turns for case in turn if case is not None)


def _is_of(case: Case, model: str) -> bool:
  # The vocabulary of a model is never shared there.
  name = case.spec.name
  users = name.partition(' ')[0].split('+')
  return any(
    user == model or f'{user}/'.startswith(f'{model}/tp1/') for user in users
  )


def _kind(case: Case) -> tuple:
  """Returns what another code of a kernel runs for."""
  names = ('weight_dtype', 'window')
  return tuple(getattr(case.spec, name, None) for name in names)


def _rank(case: Case) -> tuple:
  """Returns a key that is less for shapes of more value."""
  tokens = getattr(case.spec, 'num_tokens', _MOST_VALUABLE_TOKENS)
  is_float32 = getattr(case.spec, 'dtype', None) == 'float32'
  return abs(tokens - _MOST_VALUABLE_TOKENS), is_float32


@functools.cache
def bandwidth() -> float:
  """Returns the bytes per second that the device reads."""
  is_cpu = jax.default_backend() == 'cpu'
  return kernel_timing.read_bandwidth(2**24 if is_cpu else 2**30, REPEATS)
