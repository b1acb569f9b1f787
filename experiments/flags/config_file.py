"""The file of --config: settings that `experiments.tune` found best."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

from experiments.output import benchmark_output, provenance
from swiftspec_jax import errors

_CONFIG = flags.DEFINE_string(
  'config',
  None,
  'File of experiments.tune. Its settings stand in for the flags that are not '
  'given.',
)

# What the settings were tuned for, and what was tuned.
_FIXED = (
  'target',
  'dtype',
  'weight_dtype',
  'draft',
  'draft_layers',
  'draft_weight_dtype',
  'target_devices',
  'draft_devices',
)
_TUNED = (
  'mode',
  'num_nodes',
  'width',
  'num_draft_steps',
  'branching',
  'num_restart_steps',
  'coverage',
  'adaptive',
  'run_ahead',
)
_ENTRIES = ('flags', 'device_kind', 'forced_acceptance', 'provenance', 'trials')


def write(
  path: pathlib.Path, settings: Mapping[str, Any], trials: list[dict[str, Any]]
) -> None:
  """Makes or replaces a configuration.

  Args:
    path: path of the file.
    settings: values of flags, by name; None stands for the default.
    trials: trials that led to them, for the record.
  """
  values = {
    'flags': {name: settings.get(name) for name in _FIXED + _TUNED},
    'device_kind': jax.devices()[0].device_kind,
    'forced_acceptance': settings.get('forced_acceptance'),
    'provenance': provenance.collect(),
    'trials': trials,
  }
  benchmark_output.write_json(path, values)


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
    try:
      value = holder.parser.parse(value)
    except (TypeError, ValueError) as error:
      raise errors.UserError(f'{path}: {name}: {error}') from error
    if not holder.present:
      holder.value = value
    elif name in _FIXED and holder.value != value:
      raise errors.UserError(
        f'--{name}={holder.value}, but {path} was tuned for --{name}={value}; '
        'tune for that with experiments.tune'
      )


def check_device() -> None:
  """Raises UserError if --config was made on another kind of device."""
  if _CONFIG.value is None:
    return
  path = pathlib.Path(_CONFIG.value)
  tuned, found = _load(path).get('device_kind'), jax.devices()[0].device_kind
  if tuned != found:
    raise errors.UserError(
      f'{path} was tuned on {tuned} devices, here they are {found}; run '
      'experiments.tune here'
    )


def _read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the settings of the file."""
  values = _load(path)
  settings = values.get('flags')
  if not isinstance(settings, dict):
    raise errors.UserError(f"{path} is no configuration: 'flags' is missing")
  for found, known in ((values, _ENTRIES), (settings, _FIXED + _TUNED)):
    for name in found:
      if name not in known:
        raise errors.UserError(
          f'{path}: unknown key {name!r}; there are {", ".join(known)}'
        )
  return settings


def _load(path: pathlib.Path) -> dict[str, Any]:
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise errors.UserError(f'cannot read --config={path}: {reason}') from error
  if not isinstance(values, dict):
    raise errors.UserError(f'{path} is no configuration: not a JSON object')
  return values
