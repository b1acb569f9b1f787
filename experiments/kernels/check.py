"""Kernels against their references, where `auto` could not compare them."""

from kernels_pallas import trials


def run() -> None:
  """Compares what `kernels='auto'` has noted."""
  found = trials.check_uncompared()
  for trial, verdict in found:
    print(
      f'{trial.kernel} of {trial.spec.name}: {trial.implementation} '
      f'{verdict.detail}'
    )
  num_good = sum(verdict.is_good for _, verdict in found)
  print(f'{num_good} of {len(found)} kernels agree; see {trials.folder()}')
