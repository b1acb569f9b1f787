"""Writes and prints what the records of a benchmark say."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.measuring import benchmark_plot, benchmark_report
from experiments.output.benchmark_output import Record
from swiftspec_jax.cli import output_files


def write(
  directory: pathlib.Path,
  records: Sequence[Record],
  modes: Sequence[str],
  facts: Mapping[str, Any],
  models: str,
  *,
  is_greedy: bool,
) -> dict[str, dict[str, Any]]:
  """Writes summary.json and results.png, and prints the table.

  Args:
    directory: folder of the files.
    records: records of one benchmark; not empty.
    modes: modes of the records, in the order of the table.
    facts: provenance.
    models: names and dtypes, for the picture.
    is_greedy: whether equal outputs are expected.

  Returns:
    What `benchmark_report.summarize` does.
  """
  summary = benchmark_report.summarize(records, modes, is_greedy=is_greedy)
  output_files.write_json(
    directory / 'summary.json', {'modes': summary, 'provenance': facts}
  )
  num_prompts = max(figures['num_prompts'] for figures in summary.values())
  title = (
    f'{models}, {num_prompts} prompts, batch size 1\n{facts["cpu"]}, '
    f'{facts["device_count"]} x {facts["device_kind"]}'
  )
  if label := benchmark_report.forced_label(summary):
    title += f'\n{label}'
  picture = benchmark_plot.draw(summary, title)
  output_files.write(directory / 'results.png', picture)
  print(benchmark_report.table(summary))
  if label:
    print(f'{label}: the draft was told the output, to study speed')
  if is_greedy:
    for line in benchmark_report.describe_differences(records):
      print(line)
  return summary
