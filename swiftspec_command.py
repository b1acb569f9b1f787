"""The start of the command `swiftspec`.

Folders of research often have packages `experiments` and `configs`, which
Python finds first where they are on its path. This name nobody else has.
"""

import importlib.util
import pathlib
import sys

_PACKAGES = ('configs', 'experiments')


def main() -> None:
  """Runs `experiments.command`, from the folder of this file."""
  for name in _PACKAGES:
    folder = pathlib.Path(__file__).parent / name
    spec = importlib.util.spec_from_file_location(name, folder / '__init__.py')
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
  from experiments import command

  command.main()
