r"""Measures what a draft is worth for its target.

  python -m experiments.evaluate_draft --target=T --draft=D \
    --prompts=FILE.jsonl --output_dir=results

Decodes every prompt with a chain of 4 and with trees of 8 and 16 nodes (serial
mode), and measures the steps of both models apart. From both it predicts the
speedup, by the formulas of `experiments.measuring.evaluation_report`. The
directory gets
results.jsonl (a line for each prompt and mode), summary.json and
acceptance.png. Ctrl-C keeps what is done, and --resume goes on with it.
"""

import collections
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

import swiftspec_jax as ss
from experiments.flags import run_flags
from experiments.measuring import (
  benchmark_plot,
  benchmark_run,
  evaluation_report,
)
from experiments.output import benchmark_output
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program, provenance, step_times
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import shared_flags, tree_flags

_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit()
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 1, 'Has no effect any more, and goes in 0.4.', lower_bound=1
)
_OUTPUT_DIR = run_flags.output_dir()
_RESUME = run_flags.resume()
flags.FLAGS.set_default('max_new_tokens', 128)

# What this program decides itself.
_FIXED = (
  'config',
  'num_nodes',
  'num_speculative_tokens',
  'forced_acceptance',
)
_NUM_MEASUREMENTS = 3  # of each step time; other programs slow some of them


def main() -> None:
  """Runs the program."""
  for name in _FIXED:
    if flags.FLAGS[name].present:
      raise errors.UserError(
        f'--{name} has no meaning here: what is measured is a chain of 4 and '
        'trees of 8 and 16 nodes'
      )
  if _BATCH_SIZE.value != 1:
    logging.warning(
      '--batch_size=%d has no effect any more: prompts decode one at a time, '
      'as in benchmark. The flag goes in 0.4.',
      _BATCH_SIZE.value,
    )
  shared_flags.check(['serial'])
  prompts_path = pathlib.Path(_PROMPTS.value)
  prompts = prompts_lib.read_prompts(prompts_path, _LIMIT.value)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  settings = shared_flags.shared_settings(prompts_path, limit=_LIMIT.value)
  records = benchmark_output.open_directory(
    directory, settings, resume=_RESUME.value
  )
  target = shared_flags.load_target()
  draft = shared_flags.load_draft(target, 'serial')
  sampling = shared_flags.sampling()
  bench = benchmark_run.Bench(target, prompts, sampling)
  print('measuring steps...', file=sys.stderr, flush=True)
  times = _measure_steps(target, draft, bench)
  benchmark_output.write_settings(directory, settings)
  facts = {
    **provenance.collect(),
    'target': target.name,
    'draft': draft.name,
    'draft_config': draft.config.to_json(),
    'dtype': target.dtype.name,
    'num_skipped': len(prompts) - len(bench.encoded),
    'num_resumed': len(records),
    'flags': settings,
  }
  modes = evaluation_report.MODES
  runners = {
    mode: bench.runner(bench.warmed(_decoder(mode, target, draft)))
    for mode in modes
  }
  jobs = benchmark_run.plan(bench.encoded, modes, 1, {r.key for r in records})
  with program.reporting(lambda: _report(records, times, directory, facts)):
    benchmark_run.run(jobs, runners, [sampling], records, directory)


def _tree(num_nodes: int) -> ss.TreeConfig:
  tree = tree_flags.config_without_defaults()
  return dataclasses.replace(tree, num_nodes=num_nodes)


def _measure_steps(
  target: ss.Model, draft: ss.Model, bench: benchmark_run.Bench
) -> evaluation_report.StepTimes:
  """Times the forwards of both models, one row each, in turn."""
  width = tree_flags.config_with_width().width
  sizes = (evaluation_report.CHAIN_LENGTH + 1, *evaluation_report.TREE_SIZES)
  decoders = {1: bench.warmed(ss.Decoder(target))}
  decoders |= {
    size: bench.warmed(ss.Decoder(target, draft, tree=_tree(size)))
    for size in sizes
  }
  target_seconds = collections.defaultdict(list)
  draft_seconds = collections.defaultdict(list)
  for _ in range(_NUM_MEASUREMENTS):
    for size, decoder in decoders.items():
      seconds = step_times.target_step_seconds(decoder, size)
      target_seconds[size].append(seconds)
    for leaves in sorted({1, width}):
      tree = dataclasses.replace(tree_flags.config(), width=leaves)
      draft_seconds[leaves].append(
        step_times.draft_step_seconds(draft, tree, bench.max_tokens)
      )
  return evaluation_report.StepTimes(
    target={n: statistics.median(s) for n, s in target_seconds.items()},
    draft={n: statistics.median(s) for n, s in draft_seconds.items()},
    width=width,
  )


def _decoder(mode: str, target: ss.Model, draft: ss.Model) -> ss.Decoder:
  """Returns what decodes in one of `evaluation_report.MODES`."""
  if mode == evaluation_report.CHAIN:
    # A tree of one leaf, as drafts that read features have no other chains.
    length = evaluation_report.CHAIN_LENGTH
    tree = ss.TreeConfig(
      num_nodes=length + 1,
      num_draft_steps=length,
      width=1,
      branching=1,
      prompt_lookup=False,
    )
  else:
    tree = _tree(int(mode.removeprefix('tree')))
  return ss.Decoder(target, draft, tree=tree, run_ahead=tree_flags.run_ahead())


def _report(
  records: Sequence[benchmark_output.Record],
  times: evaluation_report.StepTimes,
  directory: pathlib.Path,
  facts: dict[str, Any],
) -> None:
  """Writes and prints what the results say."""
  if not records:
    return
  summary = evaluation_report.summarize(records, times)
  output_files.write_json(
    directory / 'summary.json', {**summary, 'provenance': facts}
  )
  title = (
    f'{facts["target"]} + {facts["draft"]}, {facts["dtype"]}, '
    f'{summary["num_prompts"]} prompts'
  )
  picture = benchmark_plot.draw_acceptance(records, title)
  output_files.write(directory / 'acceptance.png', picture)
  print(title)
  print(evaluation_report.table(summary))
  print(
    'p1...: share of the rounds that accept the position of the chain; chain4, '
    'tree8, tree16: tokens a round; x: predicted speedup'
  )
  print(evaluation_report.describe_steps(times))
  print(f'written to {directory}')


if __name__ == '__main__':
  program.run(main)
