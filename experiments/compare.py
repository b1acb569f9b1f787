r"""Sets the systems of the field side by side.

  python -m experiments.compare --limit=12 --output_dir=results
  python -m experiments.compare --systems=autoregressive,tree,ddd,sssd \
    --settings=prompts --output_dir=results
  python -m experiments.compare --systems=autoregressive,smartspec,su \
    --settings=load --tree_sizes=3,7,15 --output_dir=results

In the setting prompts every system that decodes takes every prompt, one at a
time, on the devices at hand. In the setting load those with a policy serve the
same requests in virtual time, as simulate_load does. rows.jsonl has a line for
each system and setting. The folders prompts/ and load/ have what experiments.
benchmark and simulate_load write, with the pictures. Ctrl-C keeps what is done.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from experiments.flags import load_flags, run_flags
from experiments.load import load_output, load_report, simulated_load
from experiments.measuring import benchmark_run, benchmark_writer
from experiments.output import benchmark_output
from experiments.studies import systems
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program, provenance
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import flag_values, shared_flags

_SETTINGS = _PROMPTS_SETTING, _LOAD_SETTING = ['prompts', 'load']
_SYSTEMS = flags.DEFINE_list(
  'systems',
  None,
  f'Some of {", ".join(systems.SYSTEMS)}. Default: all that need no further '
  'devices, nor a --draft that is not given.',
)
_SETTINGS_FLAG = flags.DEFINE_list(
  'settings', _SETTINGS, f'Some of {", ".join(_SETTINGS)}.'
)
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit()
_OUTPUT_DIR = run_flags.output_dir()
flags.FLAGS.set_default('tree_sizes', ['3', '7', '15'])

# Of both kinds of rows, where they apply.
_PROMPT_FIGURES = (
  'tokens_per_second',
  'speedup',
  'acceptance_length',
  'outputs_equal',
)
_LOAD_FIGURES = (
  'acceptance_length',
  'mean_e2e_latency',
  'throughput',
  'slo_attainment',
  'tpot_attainment',
  'kept_throughput',
)


def main() -> None:
  """Runs the program."""
  for name in ('policies', 'forced_acceptance'):
    if flags.FLAGS[name].present:
      raise errors.UserError(f'--{name} has no meaning here; give --systems')
  decoding, serving = _taking_part()
  if decoding:
    shared_flags.check(systems.modes(decoding))
    path = pathlib.Path(_PROMPTS.value)
    prompts = prompts_lib.read_prompts(path, _LIMIT.value)
  load = None
  if serving:
    load = simulated_load.SimulatedLoad()
    load.check_fits()
    for name in serving:
      load.policy(systems.SYSTEMS[name].policy)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  output_files.open_directory(directory)
  if load is not None:
    _serve(serving, load, directory)
  if decoding:
    _decode(decoding, prompts, directory)
  print(f'written to {directory}')


def _taking_part() -> tuple[list[str], list[str]]:
  """Returns the systems that decode prompts, and those that serve load."""
  run_flags.check_names('systems', _SYSTEMS.value or [], systems.SYSTEMS)
  run_flags.check_names('settings', _SETTINGS_FLAG.value, _SETTINGS)
  names = _SYSTEMS.value or [*filter(systems.is_default, systems.SYSTEMS)]
  settings = _SETTINGS_FLAG.value
  decoding = [n for n in names if systems.SYSTEMS[n].decodes]
  serving = [n for n in names if systems.SYSTEMS[n].policy is not None]
  decoding = decoding if _PROMPTS_SETTING in settings else []
  serving = serving if _LOAD_SETTING in settings else []
  if not decoding and not serving:
    raise errors.UserError(
      f'none of {", ".join(names)} takes part in {", ".join(settings)}'
    )
  return decoding, serving


def _serve(
  names: Sequence[str],
  load: simulated_load.SimulatedLoad,
  directory: pathlib.Path,
) -> None:
  """Serves the same requests with each system's policy, in virtual time."""
  folder = directory / _LOAD_SETTING
  folder.mkdir()
  rows: list[dict[str, Any]] = []

  def run(name, arrivals, acceptance):
    return load.run(systems.SYSTEMS[name].policy, arrivals, acceptance)

  try:
    load_output.sweep(
      load_flags.request_rates(),
      rows,
      folder,
      prepare=load.acceptance,
      run=run,
      names=names,
    )
  finally:
    if rows:
      load_output.report(
        rows, folder, simulated_load.title(), flag_values.of(simulated_load)
      )
    for row in load_report.average(rows):
      setting = f'{_LOAD_SETTING} at {row["request_rate"]:g}/s, simulated'
      _append(directory, row['policy'], setting, row, _LOAD_FIGURES)


def _decode(
  names: Sequence[str],
  prompts: Sequence[prompts_lib.Prompt],
  directory: pathlib.Path,
) -> None:
  """Decodes the same prompts with each system."""
  folder = directory / _PROMPTS_SETTING
  folder.mkdir()
  target = shared_flags.load_target()
  sampling = shared_flags.sampling()
  bench = benchmark_run.Bench(target, prompts, sampling)
  drafts = shared_flags.load_drafts(target, systems.modes(names))
  runners = {}
  for name in names:
    print(f'compiling {name}...', file=sys.stderr, flush=True)
    draft = drafts.get(systems.SYSTEMS[name].mode)
    decoder = systems.make_decoder(name, target, draft)
    runners[name] = bench.runner(bench.warmed(decoder))
  records: list[benchmark_output.Record] = []
  jobs = benchmark_run.plan(bench.encoded, names, 1)
  # The first prompt runs before and is not counted.
  warmup = benchmark_run.plan(bench.encoded[:1], names, 1)
  benchmark_run.run(warmup, runners, [sampling], [], label='warming up')
  try:
    benchmark_run.run(jobs, runners, [sampling], records, folder)
  finally:
    if records:
      settings = shared_flags.to_json()
      facts = {**provenance.collect(), 'flags': settings}
      models = f'{settings["target"]}, {target.dtype.name}'
      summary = benchmark_writer.write(
        folder,
        records,
        names,
        facts,
        models,
        is_greedy=sampling.temperature == 0,
      )
      for name, figures in summary.items():
        _append(directory, name, _PROMPTS_SETTING, figures, _PROMPT_FIGURES)


def _append(
  directory: pathlib.Path,
  name: str,
  setting: str,
  figures: Mapping[str, Any],
  columns: Sequence[str],
) -> None:
  """Adds a row with the figures that there are."""
  found = {c: figures[c] for c in columns if figures.get(c) is not None}
  row = {'system': name, 'setting': setting, **found}
  output_files.append_line(directory / 'rows.jsonl', row)


if __name__ == '__main__':
  program.run(main)
