"""The folder of a load experiment: pictures, and where the rows come from."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import (
  benchmark_output,
  load_flags,
  load_plot,
  load_report,
  provenance,
)


def report(
  rows: Sequence[Mapping[str, Any]],
  directory: pathlib.Path,
  title: str,
  settings: Mapping[str, Any],
) -> None:
  """Writes and prints what the rows say.

  Args:
    rows: a line for each policy, rate and seed.
    directory: for the results.
    title: of the pictures.
    settings: values of the program's own flags, by name.
  """
  text = json.dumps(
    {**provenance.collect(), 'flags': {**settings, **load_flags.to_json()}},
    indent=2,
  )
  benchmark_output.write(directory / 'provenance.json', text.encode())
  averages = load_report.average(rows)
  for name, draw in (
    ('latency', load_plot.draw_latency),
    ('lengths', load_plot.draw_lengths),
  ):
    picture = draw(averages, title)
    if picture is not None:
      benchmark_output.write(directory / f'{name}.png', picture)
  print(title)
  print(load_report.table(averages))
  print('times in ms')
  for line in load_report.compare(averages):
    print(line)
