"""The runs of a load experiment, and the folder of their results."""

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tqdm

from experiments.flags import load_flags
from experiments.load import load_plot, load_report
from swiftspec_jax.cli import output_files, provenance
from swiftspec_jax.cli.flags import flag_values
from swiftspec_jax.simulator.arrivals import Arrivals
from swiftspec_jax.simulator.load_metrics import LoadRecorder


def sweep(
  rates: Sequence[float],
  rows: list[dict[str, Any]],
  directory: pathlib.Path,
  *,
  prepare: Callable[[Arrivals, int], Any],
  run: Callable[[str, Arrivals, Any], tuple[LoadRecorder, dict[str, Any]]],
  names: Sequence[str] = (),
) -> None:
  """Adds a row for each run, to the list and line by line to the file.

  Args:
    rates: requests per second.
    rows: rows to be added to.
    directory: folder for rows.jsonl, and for steps.jsonl: how many steps of
      each run had which rows and tokens.
    prepare: makes of arrivals and a seed what all policies share.
    run: serves the arrivals with the policy of that name, given what
      `prepare` made; returns what happened and further columns.
    names: policies, by default those of the flags.
  """
  names = names or load_flags.policy_names()
  target = load_flags.latency_target()
  total = len(rates) * len(load_flags.seeds()) * len(names)
  with tqdm.tqdm(total=total, desc='runs', mininterval=0.5) as progress:
    for rate, seed in itertools.product(rates, load_flags.seeds()):
      arrivals = load_flags.arrivals(rate, seed)
      shared = prepare(arrivals, seed)
      for name in names:
        progress.set_postfix_str(f'{name} at {rate:g}/s')
        recorder, more = run(name, arrivals, shared)
        figures = recorder.summarize(target)
        row = {'policy': name, 'request_rate': rate, **figures}
        row |= {'seed': seed, **more}
        rows.append(row)  # first, so that Ctrl-C loses no row of the file
        output_files.append_line(directory / 'rows.jsonl', row)
        steps = {key: row[key] for key in ('policy', 'request_rate', 'seed')}
        counts = sorted(recorder.shapes.items())
        steps['shapes'] = [[*shape, count] for shape, count in counts]
        output_files.append_line(directory / 'steps.jsonl', steps)
        progress.update()


def report(
  rows: Sequence[Mapping[str, Any]],
  directory: pathlib.Path,
  title: str,
  settings: Mapping[str, Any],
) -> None:
  """Writes and prints what the rows say.

  Args:
    rows: a line for each policy, rate and seed.
    directory: folder for the results.
    title: title of the pictures.
    settings: values of the program's own flags, by name.
  """
  output_files.write_json(
    directory / 'provenance.json',
    {**provenance.collect(), 'flags': settings | flag_values.of(load_flags)},
  )
  averages = load_report.average(rows)
  output_files.write_pictures(directory, load_plot.draw(averages, title))
  print(title)
  print(load_report.table(averages))
  print('times in ms')
  for line in load_report.compare(averages):
    print(line)
