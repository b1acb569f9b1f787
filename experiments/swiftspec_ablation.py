r"""What each part of SwiftSpec brings, in one run on the devices at hand.

  python -m experiments.swiftspec_ablation --draft=DRAFT --output_dir=results

Compares plain decoding, serial and asynchronous trees and each switch of the
latter, sweeps their sizes, and compares acceptance in serial and asynchronous
mode. All configurations take turns at every prompt. The directory gets
rows.jsonl (a line for each configuration), acceptance.jsonl (async over serial,
for each task), results.jsonl (a line for each output), timelines.jsonl,
provenance.json, speed.png, sweeps.png and acceptance.png. Ctrl-C keeps what is
done, and --resume goes on with it.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tqdm
from absl import flags

import swiftspec_jax as ss
from experiments.flags import run_flags
from experiments.measuring import benchmark_report, benchmark_run
from experiments.output import benchmark_output
from experiments.studies import (
  ablation_plot,
  ablation_report,
  ablation_settings,
  acceptance_loss,
)
from experiments.studies.ablation_settings import Configuration
from swiftspec_jax import errors
from swiftspec_jax.cli import (
  output_files,
  program,
  provenance,
  references,
  tracing,
)
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
_REPEATS = run_flags.repeats(3)
_TIMELINE_TOKENS = flags.DEFINE_integer(
  'timeline_tokens',
  64,
  'Tokens of the extra run of each configuration that gives its step times.',
  lower_bound=1,
)
_OUTPUT_DIR = run_flags.output_dir()
_RESUME = run_flags.resume()

_TIMELINES = 'timelines.jsonl'


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Study:
  """What is compared, and with what."""

  configurations: list[Configuration]
  target: ss.Model
  drafts: Mapping[str, ss.Model]
  references: references.References
  encoded: list[tuple[prompts_lib.Prompt, tuple[int, ...]]]

  def decoder(
    self, configuration: Configuration, timeline: ss.Timeline | None = None
  ) -> ss.Decoder:
    """Returns a decoder of a configuration, compiled."""
    if configuration.tree is None:
      decoder = ss.Decoder(self.target)
    else:
      decoder = ss.Decoder(
        self.target,
        self.drafts[configuration.mode],
        tree=configuration.tree,
        run_ahead=configuration.run_ahead,
        timeline=timeline,
      )
    self.warmup(decoder)
    return decoder

  def warmup(self, decoder: ss.Decoder) -> None:
    """Compiles what the prompts can need."""
    sampling = shared_flags.sampling()
    longest = max(len(token_ids) for _, token_ids in self.encoded)
    decoder.warmup(longest + sampling.max_new_tokens, sampling)


def main() -> None:
  """Runs the program."""
  config_file.apply()
  tree = tree_flags.config_with_width()
  configurations = ablation_settings.choose(
    ablation_settings.configurations(tree, tree_flags.run_ahead()),
    _CONFIGURATIONS.value,
  )
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
    timeline_tokens=_TIMELINE_TOKENS.value,
    configurations=[c.name for c in configurations],
  )
  records = benchmark_output.open_directory(
    directory, settings, resume=_RESUME.value
  )
  timelines = {
    line['name']: line['summary']
    for line in output_files.read_lines(directory / _TIMELINES)
  }
  target = shared_flags.load_target()
  max_new_tokens = shared_flags.sampling().max_new_tokens
  study = _Study(
    configurations=configurations,
    target=target,
    drafts=shared_flags.load_drafts(target, modes),
    references=references.References(target),
    encoded=benchmark_run.encode(target, prompts, max_new_tokens),
  )
  benchmark_output.write_settings(directory, settings)
  facts = provenance.collect()

  def report():
    facts['kernels'] = provenance.kernels()
    _report(study, records, timelines, directory, facts)

  with program.reporting(report):
    _measure(study, records, timelines, directory)


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


def _measure(
  study: _Study,
  records: list[benchmark_output.Record],
  timelines: dict[str, Any],
  directory: pathlib.Path,
) -> None:
  """Adds what is missing, to the lists and line by line to the files."""
  runners = {}
  for configuration in tqdm.tqdm(study.configurations, desc='compiling'):
    name = configuration.name
    runners[name] = _runner(study, configuration)
    if configuration.tree is not None and name not in timelines:
      timelines[name] = _timeline(study, configuration)
      line = {'name': name, 'summary': timelines[name]}
      output_files.append_line(directory / _TIMELINES, line)
  samplings = shared_flags.samplings(_REPEATS.value)
  done = {record.key for record in records}
  jobs = benchmark_run.plan(study.encoded, list(runners), _REPEATS.value, done)
  benchmark_run.run(jobs, runners, samplings, records, directory)


def _runner(
  study: _Study, configuration: Configuration
) -> benchmark_run.Runner:
  tree = configuration.tree
  return benchmark_run.make_runner(
    study.decoder(configuration),
    None if tree is None else tree.forced_acceptance,
    study.references.add_to,
  )


def _timeline(study: _Study, configuration: Configuration) -> dict[str, float]:
  """Returns the figures of a run apart, which notes when programs ran."""
  timeline = ss.Timeline()
  decode = benchmark_run.make_decode(study.decoder(configuration, timeline))
  sampling = shared_flags.sampling()
  max_new_tokens = min(_TIMELINE_TOKENS.value, sampling.max_new_tokens)
  request = ss.Request(
    token_ids=study.encoded[0][1],
    sampling=dataclasses.replace(
      sampling, max_new_tokens=max_new_tokens, ignore_eos=True
    ),
  )
  if configuration.tree.forced_acceptance:
    request = study.references.add_to(request)
  return tracing.trace(timeline, lambda: decode(request)).summary


def _report(
  study: _Study,
  records: Sequence[benchmark_output.Record],
  timelines: Mapping[str, Any],
  directory: pathlib.Path,
  facts: Mapping[str, Any],
) -> None:
  """Writes and prints what the results say."""
  if not records:
    return
  is_greedy = shared_flags.sampling().temperature == 0
  rows = ablation_report.make_rows(
    study.configurations, records, timelines, is_greedy=is_greedy
  )
  names = [configuration.name for configuration in study.configurations]
  losses = acceptance_loss.make_rows(names, records)
  for name, table in (('rows', rows), ('acceptance', losses)):
    output_files.write_lines(directory / f'{name}.jsonl', table)
  output_files.write_json(
    directory / 'provenance.json', {**facts, 'flags': shared_flags.to_json()}
  )
  title = _title(study, rows, facts)
  pictures = {
    'speed': ablation_plot.draw_speed(rows, title),
    'sweeps': ablation_plot.draw_sweeps(rows, title),
    'acceptance': ablation_plot.draw_acceptance(losses, title),
  }
  output_files.write_pictures(directory, pictures)
  print(title)
  print(ablation_report.table(rows))
  print('times in ms: round; target and draft forward; host work in a round')
  if comparison := acceptance_loss.table(losses):
    print(f'\n{comparison}')
  if is_greedy:
    for line in benchmark_report.describe_differences(records):
      print(line)
  print(f'written to {directory}')


def _title(study, rows, facts) -> str:
  """Returns on what it was measured."""
  names = [study.target.name, *(draft.name for draft in study.drafts.values())]
  devices = shared_flags.to_json()
  title = (
    f'{" + ".join(dict.fromkeys(names))}, {study.target.dtype.name}\n'
    f'{facts["cpu"]}, {devices["target_devices"]} + '
    f'{devices["draft_devices"]} x {facts["device_kind"]}'
  )
  forced = {row['forced_acceptance'] for row in rows} - {None}
  if forced:
    title += f', forced acceptance {forced.pop():g}'
  return title


if __name__ == '__main__':
  program.run(main)
