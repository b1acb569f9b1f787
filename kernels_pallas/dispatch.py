"""Which implementation of a kernel runs, and why.

The choice is made while a program is traced, once for each shape. It is
logged then, and `choices` lists all that were made in this process.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping

import jax
from absl import logging
from jax.sharding import Sharding

REFERENCE = 'reference'
IMPLEMENTATIONS = (
  'auto',
  REFERENCE,
  'pallas_tpu',
  'pallas_gpu',
  'mosaic_gpu',
  'native',
)
_CONCURRENT = '--xla_gpu_command_buffer_scheduling_mode=CONCURRENT'
_LOOPS = re.compile(r'--xla_gpu_enable_command_buffer=\S*WHILE')
_ON_GPU = ('pallas_gpu', 'mosaic_gpu')
_OF_PLATFORM = {
  'tpu': ('pallas_tpu',),
  'gpu': _ON_GPU,
  'cuda': _ON_GPU,
  'cpu': ('native',),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """The implementation of one kernel at one shape.

  Attributes:
    kernel: name of the kernel.
    shape: shapes of the arguments, in words.
    implementation: one of `IMPLEMENTATIONS`, but not 'auto'.
    reason: reason of the choice, in words.
  """

  kernel: str
  shape: str
  implementation: str
  reason: str


@dataclasses.dataclass(frozen=True)
class Verdict:
  """How an implementation compares with the reference on some devices.

  Attributes:
    is_good: whether 'auto' may take it.
    detail: the finding, in words that follow the name of the implementation.
    is_compared: whether the two have been compared.
  """

  is_good: bool
  detail: str
  is_compared: bool = True


_choices: dict[tuple[str, ...], Choice] = {}


def choices() -> list[Choice]:
  """Returns the choices made so far, in their order."""
  return list(_choices.values())


def implementations_of(platform: str) -> tuple[str, ...]:
  """Returns the implementations for a platform, that of 'auto' first."""
  return (*_OF_PLATFORM.get(platform, ()), REFERENCE)


def device_of(sharding: Sharding | None) -> jax.Device:
  """Returns one of an array's devices, by default JAX's own."""
  devices = jax.devices() if sharding is None else sharding.device_set
  return next(iter(devices))


def platform_of(sharding: Sharding | None) -> str:
  """Returns the platform of an array's devices, by default JAX's own."""
  return device_of(sharding).platform


def check_flags(*, has_kernels: bool = True) -> None:
  """Raises ValueError if XLA's flags give wrong results on GPUs.

  Kernels that run at once would write to the same counters (`last_program`),
  which XLA does not see. Loops in command buffers end too early: trees did not
  grow on an H100 (jaxlib 0.11.2).

  Args:
    has_kernels: whether there are kernels besides those of XLA.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  if _LOOPS.search(flags):
    raise ValueError(
      'XLA_FLAGS puts loops into command buffers, where they end too early; '
      'leave WHILE out of --xla_gpu_enable_command_buffer'
    )
  if has_kernels and _CONCURRENT in flags:
    raise ValueError(
      f'XLA_FLAGS has {_CONCURRENT}, and kernels for GPUs must run one after '
      'the other; leave it out, or take kernels=reference'
    )


def choose(
  kernel: str,
  shape: str,
  implementation: str,
  platform: str,
  checks: Mapping[str, Callable[[], None]],
  trial: Callable[[str], Verdict] | None = None,
) -> str:
  """Returns the implementation to run.

  Args:
    kernel: name of the kernel, for the record.
    shape: shapes of the arguments in words, for the record.
    implementation: one of `IMPLEMENTATIONS`. 'auto' takes the kernel for the
      platform. It takes the reference where that kernel cannot do the shape, or
      does not agree with the reference.
    platform: JAX's name of the devices' platform, such as 'tpu'.
    checks: a function for each kernel that exists, by its name. It raises
      NotImplementedError with the reason if the kernel cannot do the shape.
      Where there is no 'mosaic_gpu', 'pallas_gpu' takes its place; where there
      is no 'native', the reference.
    trial: function that compares the named implementation with the reference
      on these devices. Only 'auto' calls it. None where `checks` refuse 'auto'.

  Raises:
    NotImplementedError: the named implementation cannot do it.
    ValueError: there is no implementation of that name.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'no implementation {implementation!r}; choose one of '
      f'{", ".join(IMPLEMENTATIONS)}'
    )
  key = (kernel, shape, implementation, platform)
  if key not in _choices:
    chosen, reason = _decide(
      kernel, shape, implementation, platform, checks, trial
    )
    _choices[key] = Choice(
      kernel=kernel, shape=shape, implementation=chosen, reason=reason
    )
    logging.info('%s of %s: %s (%s)', kernel, shape, chosen, reason)
  return _choices[key].implementation


def _decide(kernel, shape, implementation, platform, checks, trial):
  """Returns the implementation and the reason."""
  is_auto = implementation == 'auto'
  wanted = implementations_of(platform)[0] if is_auto else implementation
  reason = f'made for {platform}' if is_auto else 'asked for'
  if wanted == 'mosaic_gpu' and wanted not in checks:
    wanted, reason = 'pallas_gpu', 'there is no mosaic_gpu'
  if wanted == 'native' and wanted not in checks:
    return REFERENCE, f'no kernel for {platform}'
  if wanted == REFERENCE:
    return wanted, f'no kernel for {platform}' if is_auto else reason
  try:
    if wanted not in checks:
      raise NotImplementedError('there is none')
    checks[wanted]()
  except NotImplementedError as error:
    if is_auto:
      return REFERENCE, f'{wanted} cannot do it: {error}'
    raise NotImplementedError(
      f'{wanted} of {kernel} cannot do {shape}: {error}'
    ) from error
  if is_auto and trial is not None:
    verdict = trial(wanted)
    if not verdict.is_good:
      return REFERENCE, f'{wanted} {verdict.detail}'
    reason = f'{reason}; {verdict.detail}'
  return wanted, reason
