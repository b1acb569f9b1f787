"""The values of flags, for records of what a program did."""

from types import ModuleType
from typing import Any

from absl import flags


def of(*modules: ModuleType | str) -> dict[str, Any]:
  """Returns the values of all flags that modules define, by name."""
  return {
    flag.name: flag.value
    for module in modules
    for flag in flags.FLAGS.get_flags_for_module(module)
  }
