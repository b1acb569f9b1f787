r"""Asynchronous trees in batches: who waits for a row that missed its tree?

  python -m experiments.async_batches --prompts=FILE.jsonl --output_dir=results

Decodes all prompts in batches of several sizes. In serial mode draft and target
take turns. In asynchronous mode all rows wait for the new trees of rows that
missed, or such rows send the root alone, or that is chosen in each round
(`TreeConfig.waits_for_misses`). With --forced_acceptance a tiny pair decodes
instead, as in `experiments.plan`. What the rounds of a batch take is predicted
for the chips of --deployment, with the best split of the chips. What is chosen
follows these times. The directory gets rows.jsonl, provenance.json and
async_batches.png.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import tqdm
from absl import flags

import swiftspec_jax as ss
from configs import deployment as deployment_lib
from experiments import program
from experiments import prompts as prompts_lib
from experiments.flags import shared_flags, tree_flags
from experiments.measuring import benchmark_run
from experiments.output import benchmark_output, provenance
from experiments.planning import plan_rounds
from experiments.studies import async_batches_plot, async_batches_report
from swiftspec_jax import errors
from swiftspec_jax.drafting.trees.round_rates import RoundRates
from swiftspec_jax.engine.engine import StepRecord
from swiftspec_jax.planning.rounds import Times

_PROMPTS = flags.DEFINE_string(
  'prompts', str(prompts_lib.DEFAULT_PATH), 'JSON lines with the prompts.'
)
_LIMIT = flags.DEFINE_integer(
  'limit',
  None,
  'How many requests to take. Default: all prompts; 16 with forced acceptance.',
  lower_bound=1,
)
_BATCH_SIZES = flags.DEFINE_multi_integer(
  'batch_size', [1, 2, 4, 8], 'Rows that decode together.', lower_bound=1
)
_DEPLOYMENT = flags.DEFINE_string(
  'deployment',
  'configs/llama3_70b_3b_8xh800.py',
  'Python file with a CONFIG, see configs/.',
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
flags.FLAGS.set_default('max_new_tokens', 64)


def main() -> None:
  """Runs the program."""
  if flags.FLAGS['waits_for_misses'].present:
    raise errors.UserError(
      '--waits_for_misses has no meaning here: both ways are compared'
    )
  if tree_flags.config().forced_acceptance is not None:
    for name in ('target', 'draft', 'prompts'):
      if flags.FLAGS[name].present:
        raise errors.UserError(
          f'--{name} has no effect where acceptance is forced: any pair will do'
        )
  modes = ['serial', 'async']
  shared_flags.check(modes)
  deployment = deployment_lib.read(pathlib.Path(_DEPLOYMENT.value))
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  pairs, requests = _pairs(modes)
  target = pairs['async'][0]
  rows = []
  sizes = sorted(set(_BATCH_SIZES.value))
  jobs = list(itertools.product(sizes, async_batches_report.VARIANTS))
  with tqdm.tqdm(jobs, unit='run', mininterval=0.5) as progress:
    for batch_size, variant in progress:
      progress.set_postfix_str(f'{variant}, {batch_size} rows')
      mode, waits = async_batches_report.VARIANTS[variant]
      run = functools.partial(_run, *pairs[mode], waits, batch_size, requests)
      if waits is not None:  # the times do not matter
        run = functools.partial(_same, run())
      figures = async_batches_report.best_of_splits(
        deployment, mode, run, tree_flags.config(), batch_size
      )
      rows.append({'batch_size': batch_size, 'variant': variant, **figures})
      lines = ''.join(json.dumps(row) + '\n' for row in rows)
      benchmark_output.write(directory / 'rows.jsonl', lines.encode())
  facts = {**provenance.collect(), 'flags': _settings()}
  benchmark_output.write_json(directory / 'provenance.json', facts)
  title = (
    f'{deployment.name}; rounds of {target.name}, {len(requests)} requests'
  )
  picture = async_batches_plot.draw(rows, title)
  benchmark_output.write(directory / 'async_batches.png', picture)
  print(async_batches_report.table(rows))
  print(f'written to {directory}')


def _pairs(
  modes: Sequence[str],
) -> tuple[dict[str, tuple[ss.Model, ss.Model]], list[ss.Request]]:
  """Returns target and draft of each mode, and requests for them."""
  sampling = shared_flags.sampling()
  if tree_flags.config().forced_acceptance is not None:
    pairs = {mode: plan_rounds.tiny_pair(mode) for mode in modes}
    requests = plan_rounds.known_requests(
      pairs['serial'][0], _LIMIT.value or 16, sampling.max_new_tokens
    )
    return pairs, requests
  prompts = prompts_lib.read_prompts(pathlib.Path(_PROMPTS.value), _LIMIT.value)
  target = shared_flags.load_target()
  drafts = shared_flags.load_drafts(target, modes)
  encoded = benchmark_run.encode(target, prompts, sampling.max_new_tokens)
  requests = [
    ss.Request(token_ids=token_ids, sampling=sampling)
    for _, token_ids in encoded
  ]
  return {mode: (target, drafts[mode]) for mode in modes}, requests


def _run(
  target: ss.Model,
  draft: ss.Model,
  waits_for_misses: bool | None,
  batch_size: int,
  requests: Sequence[ss.Request],
  times: Times | None = None,
) -> list[StepRecord]:
  """Decodes all requests, as if rounds took these times; returns the rounds."""
  tree = dataclasses.replace(
    tree_flags.config(), waits_for_misses=waits_for_misses
  )
  decoder = ss.Decoder(target, draft, tree=tree, batch_size=batch_size)
  records = []
  with decoder.engine_for(requests) as engine:
    if times is not None:
      rows = engine.drafter.rows
      rows.rates = _PredictedRates(tree, times, rows.is_async)
    for request in requests:
      engine.submit(request)
    while engine.num_requests:
      record = engine.step()
      if len(record.lengths):
        records.append(record)
  return records


class _PredictedRates(RoundRates):
  """Takes rounds for as long as they are on chips with the given times."""

  def __init__(self, tree: ss.TreeConfig, times: Times, is_async: bool):
    super().__init__(tree)
    growth = tree.num_draft_steps * is_async * times.draft
    self._times = times
    self._seconds = max(times.target, growth) + times.handoff

  def observe(self, num_sent, num_tokens, num_forwards, seconds) -> None:
    del seconds
    waited = num_forwards * self._times.draft
    super().observe(num_sent, num_tokens, num_forwards, self._seconds + waited)


def _same(records: list[StepRecord], times: Times) -> list[StepRecord]:
  del times
  return records


def _settings() -> dict[str, Any]:
  holders = _PROMPTS, _LIMIT, _BATCH_SIZES, _DEPLOYMENT
  return {
    **{holder.name: holder.value for holder in holders},
    **shared_flags.to_json(),
  }


if __name__ == '__main__':
  program.run(main)
