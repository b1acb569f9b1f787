"""Makes one page of any result folders, and compares two of them.

  python -m experiments.report DIR... --output=report.html
  python -m experiments.report BEFORE AFTER --compare --output=report.html

The folders are those that programs wrote with --output_dir: benchmarks,
ablations, loads, drafts, kernels, accelerators. The page has their pictures,
their tables (a click on a column sorts by it) and where they come from, and
needs no other file and no network. With --compare it begins with the speed of
the second folder over that of the first, with intervals of confidence.
"""

import pathlib

from absl import flags

from experiments.output import report_page, result_folder, run_comparison
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program

_OUTPUT = flags.DEFINE_string('output', None, 'HTML file.', required=True)
_COMPARE = flags.DEFINE_bool(
  'compare', False, 'Compare the second of two folders with the first.'
)


def main(arguments: list[str]) -> None:
  """Runs the program on the folders that the arguments name."""
  if not arguments:
    raise errors.UserError('name at least one folder with results')
  if _COMPARE.value and len(arguments) != 2:
    raise errors.UserError(f'--compare takes two folders, not {len(arguments)}')
  folders = [result_folder.read(pathlib.Path(name)) for name in arguments]
  ratios = None
  if _COMPARE.value:
    ratios = run_comparison.compare(*(folder.samples for folder in folders))
  page = report_page.render(folders, ratios)
  output_files.write(pathlib.Path(_OUTPUT.value), page.encode())
  print(f'written to {_OUTPUT.value}')


if __name__ == '__main__':
  program.run_with_arguments(main)
