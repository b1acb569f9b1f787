"""Flags that most programs have; each function defines one."""

import pathlib
from collections.abc import Collection, Sequence

from absl import flags

from swiftspec_jax import errors

DEFAULT_PROMPTS = (
  pathlib.Path(__file__).parents[1] / 'prompts' / 'default.jsonl'
)


def output_dir() -> flags.FlagHolder[str]:
  """Defines --output_dir, which must be given."""
  return flags.DEFINE_string(
    'output_dir', None, 'New or empty directory for the results.', required=True
  )


def resume() -> flags.FlagHolder[bool]:
  """Defines --resume."""
  return flags.DEFINE_bool(
    'resume', False, 'Go on with the results in --output_dir.'
  )


def prompts() -> flags.FlagHolder[str]:
  """Defines --prompts."""
  return flags.DEFINE_string(
    'prompts', str(DEFAULT_PROMPTS), 'JSON lines with the prompts.'
  )


def limit(default: int | None = None) -> flags.FlagHolder[int]:
  """Defines --limit; a default of None is all prompts."""
  return flags.DEFINE_integer(
    'limit', default, 'How many prompts to take.', lower_bound=1
  )


def repeats(
  default: int, text: str = 'Measurements of which the median counts.'
) -> flags.FlagHolder[int]:
  """Defines --repeats."""
  return flags.DEFINE_integer('repeats', default, text, lower_bound=1)


def check_names(
  flag: str, names: Sequence[str], known: Collection[str]
) -> None:
  """Raises UserError if a list flag names what is not known, or one twice."""
  for name in names:
    errors.check_known(f'--{flag}: unknown name', name, known)
    if names.count(name) > 1:
      raise errors.UserError(f'--{flag} names {name} twice')
