r"""What each part of SwiftSpec brings, in one run on the devices at hand.

  python -m experiments.swiftspec_ablation --draft=DRAFT --output_dir=results

Compares plain decoding, serial and asynchronous trees and each switch of the
latter, and acceptance in serial and asynchronous mode. All configurations take
turns at every prompt. The directory gets what experiments.benchmark writes,
with a configuration for each mode, and acceptance.jsonl (async over serial, for
each task). Ctrl-C keeps what is done, and --resume goes on with it.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tqdm
from absl import flags

import swiftspec_jax as ss
from experiments.flags import run_flags
from experiments.measuring import benchmark_run, benchmark_writer
from experiments.output import benchmark_output
from experiments.studies import ablation_settings, acceptance_loss
from experiments.studies.ablation_settings import Configuration
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program, provenance
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import config_file, shared_flags, tree_flags

_CONFIGURATIONS = flags.DEFINE_list(
  'configurations', [], 'Names of the rows to measure. Default: all.'
)
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit(6)
_PER_TASK = flags.DEFINE_integer(
  'per_task',
  None,
  'How many prompts of each task to take, in place of --limit.',
  lower_bound=1,
)
_REPEATS = run_flags.repeats(3, 'How often to measure each prompt.')
_OUTPUT_DIR = run_flags.output_dir()
_RESUME = run_flags.resume()


def main() -> None:
  """Runs the program."""
  config_file.apply()
  tree = tree_flags.config_without_defaults()
  configurations = ablation_settings.choose(
    ablation_settings.configurations(tree, tree_flags.run_ahead()),
    _CONFIGURATIONS.value,
  )
  names = [configuration.name for configuration in configurations]
  modes = list(dict.fromkeys(c.mode for c in configurations))
  shared_flags.check(modes)
  prompts_path = pathlib.Path(_PROMPTS.value)
  prompts = _read_prompts(prompts_path)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  settings = shared_flags.shared_settings(
    prompts_path,
    limit=_LIMIT.value,
    per_task=_PER_TASK.value,
    repeats=_REPEATS.value,
    configurations=names,
  )
  records = benchmark_output.open_directory(
    directory, settings, resume=_RESUME.value
  )
  target = shared_flags.load_target()
  drafts = shared_flags.load_drafts(target, modes)
  bench = benchmark_run.Bench(target, prompts, shared_flags.sampling())
  runners = {
    c.name: bench.runner(
      bench.warmed(_decoder(c, target, drafts)),
      None if c.tree is None else c.tree.forced_acceptance,
    )
    for c in tqdm.tqdm(configurations, desc='compiling')
  }
  benchmark_output.write_settings(directory, settings)
  models = [target.name, *(draft.name for draft in drafts.values())]
  facts = {
    **provenance.collect(),
    'models': ' + '.join(dict.fromkeys(models)),
    'dtype': target.dtype.name,
    'flags': shared_flags.to_json(),
  }
  samplings = shared_flags.samplings(_REPEATS.value)
  done = {record.key for record in records}
  jobs = benchmark_run.plan(bench.encoded, names, _REPEATS.value, done)
  with program.reporting(lambda: _report(names, records, directory, facts)):
    benchmark_run.run(jobs, runners, samplings, records, directory)


def _read_prompts(path: pathlib.Path) -> list[prompts_lib.Prompt]:
  if _PER_TASK.value is None:
    return prompts_lib.read_prompts(path, _LIMIT.value)
  if _LIMIT.present:
    raise errors.UserError(
      f'--limit={_LIMIT.value} contradicts --per_task={_PER_TASK.value}; give '
      'one of them'
    )
  return prompts_lib.of_each_task(
    prompts_lib.read_prompts(path), _PER_TASK.value
  )


def _decoder(
  configuration: Configuration, target: ss.Model, drafts: Mapping[str, ss.Model]
) -> ss.Decoder:
  """Returns a decoder of a configuration."""
  if configuration.tree is None:
    return ss.Decoder(target)
  return ss.Decoder(
    target,
    drafts[configuration.mode],
    tree=configuration.tree,
    run_ahead=configuration.run_ahead,
  )


def _report(
  names: Sequence[str],
  records: Sequence[benchmark_output.Record],
  directory: pathlib.Path,
  facts: Mapping[str, Any],
) -> None:
  """Writes and prints what the results say."""
  if not records:
    return
  benchmark_writer.write(
    directory,
    records,
    names,
    facts,
    f'{facts["models"]}, {facts["dtype"]}',
    is_greedy=shared_flags.sampling().temperature == 0,
  )
  losses = acceptance_loss.make_rows(names, records)
  output_files.write_lines(directory / 'acceptance.jsonl', losses)
  if comparison := acceptance_loss.table(losses):
    print(f'\n{comparison}')
  print(f'written to {directory}')


if __name__ == '__main__':
  program.run(main)
