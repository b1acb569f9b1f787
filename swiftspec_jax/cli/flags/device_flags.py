"""Flags of the devices: how many hold which model."""

import os
from collections.abc import Collection, Sequence

import jax
from absl import flags

from swiftspec_jax import errors
from swiftspec_jax.runtime import hosts

_XLA_FLAG = 'xla_force_host_platform_device_count'

_TARGET_DEVICES = flags.DEFINE_integer(
  'target_devices',
  1,
  'Devices that share the target (tensor parallel), and its draft in all '
  'modes but async. With --distributed: of each process, by default all.',
  lower_bound=1,
)
_SEQUENCE_DEVICES = flags.DEFINE_integer(
  'sequence_devices',
  1,
  'For long contexts in the serving engine: how many of the devices of the '
  'target share the tokens of the same heads, instead of sharing the heads. It '
  'divides their number.',
  lower_bound=1,
)
_DRAFT_DEVICES = flags.DEFINE_integer(
  'draft_devices',
  1,
  'Mode async: devices that share the draft. They are the ones after those '
  'of the target. With --distributed: of each process, by default all.',
  lower_bound=1,
)
_TARGET_PROCESSES = flags.DEFINE_list(
  'target_processes',
  None,
  'With --distributed: ids of the processes whose devices share the target. '
  'Default: all, in mode async all but the last.',
)
_DRAFT_PROCESSES = flags.DEFINE_list(
  'draft_processes',
  None,
  'With --distributed, mode async: ids of the processes whose devices share '
  'the draft. Default: the last.',
)
_SIMULATED_DEVICES = flags.DEFINE_integer(
  'simulated_devices',
  None,
  'How many devices the CPU is split into. By default one, and in mode async '
  'as many as target and draft need. With --distributed: of each process.',
  lower_bound=1,
)


def prepare(modes: Sequence[str]) -> None:
  """Splits the CPU into devices; call it before anything asks JAX for them."""
  number = _SIMULATED_DEVICES.value
  is_chosen = (
    jax.config.jax_num_cpu_devices != -1
    or _XLA_FLAG in os.environ.get('XLA_FLAGS', '')
  )
  is_alone = not hosts.is_together()
  if number is None and 'async' in modes and is_alone and not is_chosen:
    number = _TARGET_DEVICES.value + _DRAFT_DEVICES.value
  if number is not None:
    jax.config.update('jax_num_cpu_devices', number)


def spread(modes: Sequence[str]) -> None:
  """Lets models share devices of all processes, where there are several.

  Raises:
    UserError: processes are named although there is one alone.
  """
  if not hosts.is_together():
    for holder in (_TARGET_PROCESSES, _DRAFT_PROCESSES):
      if holder.value is not None:
        raise errors.UserError(
          f'--{holder.name}={",".join(holder.value)} needs --distributed'
        )
    return
  ids = [*map(str, range(hosts.num_processes()))]
  is_async = 'async' in modes
  if is_async and _DRAFT_PROCESSES.value is None:
    flags.FLAGS[_DRAFT_PROCESSES.name].value = ids[-1:]
  if _TARGET_PROCESSES.value is None:
    flags.FLAGS[_TARGET_PROCESSES.name].value = ids[: -1 if is_async else None]


def check(modes: Sequence[str]) -> None:
  """Raises UserError if there are not enough devices for the modes."""
  used = target_devices()
  if 'async' in modes:
    used += draft_devices()
  idle = {*range(hosts.num_processes())} - {x.process_index for x in used}
  if idle and _TARGET_PROCESSES.value is not None:
    raise errors.UserError(
      f'process {min(idle)} has neither target nor draft; name it in '
      f'--{_TARGET_PROCESSES.name} or --{_DRAFT_PROCESSES.name}, or do not '
      'start it'
    )


def target_devices() -> list[jax.Device]:
  """Returns the devices that hold the target."""
  if _TARGET_PROCESSES.value is not None:
    return _of_processes(_TARGET_PROCESSES, _TARGET_DEVICES, taken=())
  number = _TARGET_DEVICES.value
  return _devices(number, f'--target_devices={number}')[:number]


def sequence_devices() -> int:
  """Returns how many of the target's devices share the same heads' tokens."""
  return _SEQUENCE_DEVICES.value


def draft_devices() -> list[jax.Device]:
  """Returns the devices that hold the draft of mode async."""
  if _DRAFT_PROCESSES.value is not None:
    taken = target_devices()
    return _of_processes(_DRAFT_PROCESSES, _DRAFT_DEVICES, taken)
  number = _TARGET_DEVICES.value + _DRAFT_DEVICES.value
  what = (
    f'--target_devices={_TARGET_DEVICES.value} and '
    f'--draft_devices={_DRAFT_DEVICES.value} of mode async'
  )
  return _devices(number, what)[_TARGET_DEVICES.value : number]


def _of_processes(
  processes: flags.FlagHolder,
  number: flags.FlagHolder,
  taken: Collection[jax.Device],
) -> list[jax.Device]:
  """Returns devices of some processes, those that are taken left out."""
  chosen = []
  for process in _process_ids(processes):
    free = [
      device
      for device in jax.devices()
      if device.process_index == process and device not in taken
    ]
    is_all = flags.FLAGS[number.name].using_default_value
    needed = len(free) if is_all else number.value
    if not 1 <= needed <= len(free):
      raise errors.UserError(
        f'--{processes.name}: process {process} has {len(free)} devices left, '
        f'{max(needed, 1)} are needed; choose --{_TARGET_DEVICES.name} and '
        f'--{_DRAFT_DEVICES.name}, which count for each process'
      )
    chosen += free[:needed]
  return chosen


def _process_ids(holder: flags.FlagHolder) -> list[int]:
  known = [*map(str, range(hosts.num_processes()))]
  for text in holder.value:
    if text not in known or holder.value.count(text) > 1:
      raise errors.UserError(
        f'--{holder.name}={",".join(holder.value)} must be different numbers '
        f'of processes, from 0 to {len(known) - 1}'
      )
  return [*map(int, holder.value)]


def _devices(number: int, what: str) -> list[jax.Device]:
  found = jax.local_devices()
  if number > len(found):
    platform = found[0].platform
    remedy = (
      f'; --simulated_devices={number} splits the CPU into them'
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

  The one of the flags or of --config, if they have one; else all that use
  every device, of many devices with an even number for the target.
  """
  if not all(
    flags.FLAGS[holder.name].using_default_value
    for holder in (_TARGET_DEVICES, _DRAFT_DEVICES)
  ):
    return [(_TARGET_DEVICES.value, _DRAFT_DEVICES.value)]
  number = jax.local_device_count()
  step = 1 if number <= 4 else 2
  return [(x, number - x) for x in range(step, number, step)]
