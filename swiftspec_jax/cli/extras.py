"""Packages that some programs need, and how to get them."""

import pathlib
import sys
from importlib import metadata

CHECKOUT = pathlib.Path(__file__).parents[2]


def how_to_install(extra: str) -> str:
  """Returns the command that installs an extra.

  The project is on no package index: a checkout is installed again, and for a
  wheel the packages themselves are.
  """
  if (CHECKOUT / 'pyproject.toml').exists():
    return f"{sys.executable} -m pip install -e '{CHECKOUT}[{extra}]'"
  wanted = [
    requirement.partition(';')[0].strip()
    for requirement in metadata.requires('swiftspec_jax') or ()
    if requirement.endswith(f'extra == "{extra}"')
  ]
  quoted = ' '.join(f"'{requirement}'" for requirement in wanted)
  return f'{sys.executable} -m pip install {quoted}'
