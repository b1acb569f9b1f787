"""Flags of the devices: how many hold which model."""

import os
from collections.abc import Sequence

import jax
from absl import flags

from swiftspec_jax import errors

_XLA_FLAG = 'xla_force_host_platform_device_count'

_TARGET_DEVICES = flags.DEFINE_integer(
  'target_devices',
  1,
  'Devices that share the target (tensor parallel), and its draft in all '
  'modes but async.',
  lower_bound=1,
)
_DRAFT_DEVICES = flags.DEFINE_integer(
  'draft_devices',
  1,
  'Mode async: devices that share the draft. They are the ones behind those '
  'of the target.',
  lower_bound=1,
)
_SIMULATED_DEVICES = flags.DEFINE_integer(
  'simulated_devices',
  None,
  'How many devices the CPU is split into. By default one, and in mode async '
  'as many as target and draft need.',
  lower_bound=1,
)


def prepare(modes: Sequence[str]) -> None:
  """Splits the CPU into devices; call it before anything asks JAX for them."""
  number = _SIMULATED_DEVICES.value
  is_chosen = (
    jax.config.jax_num_cpu_devices != -1
    or _XLA_FLAG in os.environ.get('XLA_FLAGS', '')
  )
  if number is None and 'async' in modes and not is_chosen:
    number = _TARGET_DEVICES.value + _DRAFT_DEVICES.value
  if number is not None:
    jax.config.update('jax_num_cpu_devices', number)


def check(modes: Sequence[str]) -> None:
  """Raises UserError if there are not enough devices for the modes."""
  if 'async' in modes:
    draft_devices()
  else:
    target_devices()
    if flags.FLAGS['draft_devices'].present:
      raise errors.UserError(
        f'--draft_devices={_DRAFT_DEVICES.value} is used by mode async only; '
        f'the mode is {", ".join(modes)}'
      )


def target_devices() -> list[jax.Device]:
  """Returns the devices that hold the target."""
  number = _TARGET_DEVICES.value
  return _devices(number, f'--target_devices={number}')[:number]


def draft_devices() -> list[jax.Device]:
  """Returns the devices that hold the draft of mode async."""
  number = _TARGET_DEVICES.value + _DRAFT_DEVICES.value
  what = (
    f'--target_devices={_TARGET_DEVICES.value} and '
    f'--draft_devices={_DRAFT_DEVICES.value} of mode async'
  )
  return _devices(number, what)[_TARGET_DEVICES.value : number]


def _devices(number: int, what: str) -> list[jax.Device]:
  found = jax.local_devices()
  if number > len(found):
    platform = found[0].platform
    remedy = (
      f'; --simulated_devices={number} splits the CPU into so many'
      if platform == 'cpu'
      else ''
    )
    raise errors.UserError(
      f'{what} need {number} devices, but there are only {len(found)} '
      f'({platform}){remedy}'
    )
  return found


def choose(target_number: int, draft_number: int) -> None:
  """Gives the flags other values than the user did."""
  flags.FLAGS[_TARGET_DEVICES.name].value = target_number
  flags.FLAGS[_DRAFT_DEVICES.name].value = draft_number


def splits() -> list[tuple[int, int]]:
  """Returns numbers of devices for target and draft of mode async.

  The one of the flags, if they are given; else all that use every device, of
  many devices with an even number for the target.
  """
  if any(
    flags.FLAGS[holder.name].present
    for holder in (_TARGET_DEVICES, _DRAFT_DEVICES)
  ):
    return [(_TARGET_DEVICES.value, _DRAFT_DEVICES.value)]
  number = jax.local_device_count()
  step = 1 if number <= 4 else 2
  return [(x, number - x) for x in range(step, number, step)]


def to_json() -> dict[str, int]:
  """Returns the values of these flags, by name."""
  return {
    holder.name: holder.value for holder in (_TARGET_DEVICES, _DRAFT_DEVICES)
  }
