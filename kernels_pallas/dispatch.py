"""Which implementation of a kernel runs, and why.

The choice is made while a program is traced, once for each shape. It is
logged then, and `choices` lists all that were made in this process.
"""

import dataclasses
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
)
_ON_GPU = ('pallas_gpu', 'mosaic_gpu')
_OF_PLATFORM = {'tpu': ('pallas_tpu',), 'gpu': _ON_GPU, 'cuda': _ON_GPU}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """The implementation of one kernel at one shape.

  Attributes:
    kernel: its name.
    shape: what it was asked for, in words.
    implementation: one of `IMPLEMENTATIONS`, but not 'auto'.
    reason: why.
  """

  kernel: str
  shape: str
  implementation: str
  reason: str


_choices: dict[tuple[str, ...], Choice] = {}


def choices() -> list[Choice]:
  """Returns the choices made so far, in their order."""
  return list(_choices.values())


def implementations_of(platform: str) -> tuple[str, ...]:
  """Returns the implementations for a platform, that of 'auto' first."""
  return (*_OF_PLATFORM.get(platform, ()), REFERENCE)


def platform_of(sharding: Sharding | None) -> str:
  """Returns the platform of an array's devices, by default JAX's own."""
  if sharding is None:
    return jax.default_backend()
  return next(iter(sharding.device_set)).platform


def choose(
  kernel: str,
  shape: str,
  implementation: str,
  platform: str,
  checks: Mapping[str, Callable[[], None]],
) -> str:
  """Returns the implementation to run.

  Args:
    kernel: its name, for the record.
    shape: of the arguments, for the record.
    implementation: one of `IMPLEMENTATIONS`; 'auto' is what is made for the
      platform, or the reference where that cannot do it.
    platform: of the devices.
    checks: for each implementation but the reference a function that raises
      NotImplementedError with the reason if it cannot do the shape. Where
      there is no 'mosaic_gpu', 'pallas_gpu' stands in.

  Raises:
    NotImplementedError: the one that is asked for cannot do it.
    ValueError: there is none of that name.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'no implementation {implementation!r}; choose one of '
      f'{", ".join(IMPLEMENTATIONS)}'
    )
  key = (kernel, shape, implementation, platform)
  if key not in _choices:
    chosen, reason = _decide(kernel, shape, implementation, platform, checks)
    _choices[key] = Choice(
      kernel=kernel, shape=shape, implementation=chosen, reason=reason
    )
    logging.info('%s of %s: %s (%s)', kernel, shape, chosen, reason)
  return _choices[key].implementation


def _decide(kernel, shape, implementation, platform, checks):
  """Returns the implementation and the reason."""
  is_auto = implementation == 'auto'
  wanted = implementations_of(platform)[0] if is_auto else implementation
  reason = f'made for {platform}' if is_auto else 'asked for'
  if wanted == 'mosaic_gpu' and wanted not in checks:
    wanted, reason = 'pallas_gpu', 'there is no mosaic_gpu'
  if wanted == REFERENCE:
    return wanted, f'no kernel for {platform}' if is_auto else reason
  try:
    checks[wanted]()
  except NotImplementedError as error:
    if is_auto:
      return REFERENCE, f'{wanted} cannot do it: {error}'
    raise NotImplementedError(
      f'{wanted} of {kernel} cannot do {shape}: {error}'
    ) from error
  return wanted, reason
