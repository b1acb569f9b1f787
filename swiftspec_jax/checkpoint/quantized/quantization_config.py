"""What config.json says of how matrices are stored, entry by entry."""

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from swiftspec_jax import errors

_KEY = 'quantization_config'


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the entries; there are none where nothing is quantized.

  Args:
    values: entries of config.json.
  """
  options = values.get(_KEY)
  return options if isinstance(options, dict) else {}


def without(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the entries of config.json that describe the model alone."""
  return {key: value for key, value in values.items() if key != _KEY}


def check(
  path: pathlib.Path,
  options: Mapping[str, Any],
  supported: Mapping[str, tuple[Any, ...]],
  ignored: Collection[str],
  prefix: str = '',
) -> None:
  """Checks that all entries are understood.

  Args:
    path: file that they are from, for messages.
    options: entries.
    supported: values that an entry may have, by its name.
    ignored: names of entries that do not change what weights are stored.
    prefix: names of the entries around these, for messages.

  Raises:
    UserError: an entry is not understood, or says what is not supported.
  """
  for key, value in options.items():
    if key in supported:
      if value not in supported[key]:
        choices = ' or '.join(map(json.dumps, supported[key]))
        refuse(path, prefix + key, value, f'it must be {choices}')
    elif key not in ignored:
      refuse(path, prefix + key, value, 'it is not understood')


def refuse(path: pathlib.Path, key: str, value: Any, reason: str) -> NoReturn:
  """Raises UserError that names an entry."""
  raise errors.UserError(
    f'{path}: {_KEY}.{key}={value!r} is not supported; {reason}'
  )
