r"""Compares kernels with their references on the device at hand.

  python -m experiments.check_kernels

`kernels='auto'` does this itself where it can, before it takes a kernel for the
first time. Where a second process cannot open the device, as on TPUs, it takes
the reference and notes what it would have compared. This program does so, while
no other one uses the device: run a model once, then this, then the model again.
"""

from experiments import program
from kernels_pallas import trials


def main() -> None:
  """Runs the program."""
  found = trials.check_uncompared()
  for trial, verdict in found:
    print(
      f'{trial.kernel} of {trial.spec.name}: {trial.implementation} '
      f'{verdict.detail}'
    )
  num_good = sum(verdict.is_good for _, verdict in found)
  print(f'{num_good} of {len(found)} kernels agree; see {trials.folder()}')


if __name__ == '__main__':
  program.run(main)
