"""The file of --config: settings that were found best."""

import pathlib
from typing import Any

import jax
from absl import flags

from swiftspec_jax import errors
from swiftspec_jax.cli import configuration
from swiftspec_jax.runtime import input_files

_CONFIG = flags.DEFINE_string(
  'config',
  None,
  'File of experiments.tune, or config.json of experiments.plan. Its settings '
  'stand in for the flags that are not given.',
)


def apply() -> None:
  """Gives the flags that are not on the command line the file's values.

  Raises:
    UserError: the file is no configuration, or one for other models or
      devices than the command line says.
  """
  if _CONFIG.value is None:
    return
  path = pathlib.Path(_CONFIG.value)
  for name, value in _read(path).items():
    # Programs that measure several modes have no flag for one.
    if value is None or name not in flags.FLAGS:
      continue
    holder = flags.FLAGS[name]
    with errors.explained(f'{path}: {name}: ', (TypeError, ValueError)):
      value = holder.parser.parse(value)
    if not holder.present:
      holder.value = value
      holder.using_default_value = False
    elif name in configuration.FIXED and holder.value != value:
      raise errors.UserError(
        f'--{name}={holder.value}, but {path} was made for --{name}={value}; '
        'make another with experiments.tune'
      )


def check_device() -> None:
  """Raises UserError if --config was tuned on another kind of device."""
  if _CONFIG.value is None:
    return
  path = pathlib.Path(_CONFIG.value)
  tuned = input_files.read_json(path, '--config').get('device_kind')
  found = jax.devices()[0].device_kind
  if tuned not in (None, found):  # plans are tuned nowhere
    raise errors.UserError(
      f'{path} was tuned on {tuned} devices, here they are {found}; run '
      'experiments.tune here'
    )


def _read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the settings of the file."""
  values = input_files.read_json(path, '--config')
  settings = values.get('flags')
  if not isinstance(settings, dict):
    raise errors.UserError(f"{path} is no configuration: 'flags' is missing")
  for found, known in (
    (values, configuration.ENTRIES),
    (settings, configuration.FIXED + configuration.TUNED),
  ):
    for name in found:
      if name not in known:
        raise errors.UserError(
          f'{path}: unknown key {name!r}; there are {", ".join(known)}'
        )
  return settings
