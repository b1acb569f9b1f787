"""What is done with flags of any kind: definitions, checks and records."""

import dataclasses
import typing
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import flags

from swiftspec_jax import errors

flags.disclaim_key_flags()  # flags are those of the module that asks for them

_DEFINE = {
  bool: flags.DEFINE_bool,
  float: flags.DEFINE_float,
  int: flags.DEFINE_integer,
}


def of(*modules: ModuleType | str) -> dict[str, Any]:
  """Returns the values of all flags that modules define, by name."""
  return {
    flag.name: flag.value
    for module in modules
    for flag in flags.FLAGS.get_flags_for_module(module)
  }


def define_fields(
  kind: type, texts: Mapping[str, str], prefix: str = ''
) -> dict[str, flags.FlagHolder]:
  """Defines flags with the types and defaults of fields; returns them by field.

  Args:
    kind: dataclass.
    texts: help of the flags, by field.
    prefix: beginning of the names of the flags, before those of the fields.
  """
  hints = typing.get_type_hints(kind)
  defaults = {field.name: field.default for field in dataclasses.fields(kind)}
  holders = {}
  for name, text in texts.items():
    only, *_ = typing.get_args(hints[name]) or (hints[name],)  # or None
    define = _DEFINE[only]
    holders[name] = define(f'{prefix}{name}', defaults[name], text)
  return holders


def numbers(name: str, example: str) -> tuple[int, ...]:
  """Returns the whole numbers that a flag lists.

  Args:
    name: name of the flag.
    example: text of what it must be, for the message.

  Raises:
    UserError: they are no numbers.
  """
  texts = flags.FLAGS[name].value
  if not all(text.isdecimal() for text in texts):
    raise errors.UserError(f'--{name}={",".join(texts)} must be {example}')
  return tuple(map(int, texts))


def sizes(holder: flags.FlagHolder) -> tuple[int, ...]:
  """Returns the sizes that a flag lists.

  Raises:
    UserError: they are no ascending whole numbers from 1 up.
  """
  found = numbers(holder.name, 'numbers such as 8,16')
  if not found or list(found) != sorted(set(found)) or found[0] < 1:
    raise errors.UserError(
      f'--{holder.name}={",".join(holder.value)} must be ascending, from 1 up'
    )
  return found
