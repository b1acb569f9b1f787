r"""Asynchronous trees in batches: who waits for a row that missed its tree?

  python -m experiments.async_batches --prompts=FILE.jsonl --output_dir=results

Decodes all prompts in batches of several sizes: in serial mode; in asynchronous
mode where all rows wait for the new trees of rows that missed; and where such
rows send the root alone (`TreeConfig.waits_for_misses`). Speeds are measured
here, and computed for devices with the step times of --target_seconds and
--draft_seconds, from the rounds that were run. Those are of Llama-3-70B and 3B
on eight H800 in the SwiftSpec paper, table 3. The directory gets rows.jsonl and
async_batches.png.
"""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import tqdm
from absl import flags

import swiftspec_jax as ss
from experiments import program
from experiments import prompts as prompts_lib
from experiments.flags import shared_flags, tree_flags
from experiments.measuring import benchmark_run, references
from experiments.output import benchmark_output, provenance
from experiments.studies import async_batches_plot, async_batches_report
from swiftspec_jax import errors
from swiftspec_jax.engine.rows import RoundRecord, RowEngine

_PROMPTS = flags.DEFINE_string(
  'prompts', str(prompts_lib.DEFAULT_PATH), 'JSON lines with the prompts.'
)
_LIMIT = flags.DEFINE_integer(
  'limit', None, 'How many prompts to take. Default: all.', lower_bound=1
)
_BATCH_SIZES = flags.DEFINE_multi_integer(
  'batch_size', [1, 2, 4, 8], 'Rows that decode together.', lower_bound=1
)
_TARGET_SECONDS = flags.DEFINE_float(
  'target_seconds', 0.01048, "A step of the target, whatever the batch's size."
)
_DRAFT_SECONDS = flags.DEFINE_float(
  'draft_seconds', 0.00325, 'A forward of the draft.'
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)
flags.FLAGS.set_default('max_new_tokens', 64)


def main() -> None:
  """Runs the program."""
  for name in ('adaptive', 'waits_for_misses'):
    if flags.FLAGS[name].present:
      raise errors.UserError(
        f'--{name} has no meaning here: sizes are fixed, and both are compared'
      )
  modes = ['serial', 'async']
  shared_flags.check(modes)
  prompts = prompts_lib.read_prompts(pathlib.Path(_PROMPTS.value), _LIMIT.value)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  target = shared_flags.load_target()
  drafts = shared_flags.load_drafts(target, modes)
  requests = _requests(target, prompts)
  rows = []
  sizes = sorted(set(_BATCH_SIZES.value))
  jobs = list(itertools.product(sizes, async_batches_report.VARIANTS))
  with tqdm.tqdm(jobs, unit='run', mininterval=0.5) as progress:
    for batch_size, variant in progress:
      progress.set_postfix_str(f'{variant}, {batch_size} rows')
      mode, waits = async_batches_report.VARIANTS[variant]
      records, seconds = _run(target, drafts[mode], waits, batch_size, requests)
      growth = tree_flags.config().num_draft_steps if mode == 'async' else 0
      figures = async_batches_report.summarize(
        records,
        seconds,
        target_seconds=_TARGET_SECONDS.value,
        draft_seconds=_DRAFT_SECONDS.value,
        num_growth_steps=growth,
      )
      rows.append({'batch_size': batch_size, 'variant': variant, **figures})
      lines = ''.join(json.dumps(row) + '\n' for row in rows)
      benchmark_output.write(directory / 'rows.jsonl', lines.encode())
  facts = {**provenance.collect(), 'flags': _settings()}
  benchmark_output.write_json(directory / 'provenance.json', facts)
  title = f'{target.name} + {drafts["async"].name}, {len(requests)} prompts'
  picture = async_batches_plot.draw(rows, title)
  benchmark_output.write(directory / 'async_batches.png', picture)
  print(async_batches_report.table(rows))
  print(f'written to {directory}')


def _requests(
  target: ss.Model, prompts: Sequence[prompts_lib.Prompt]
) -> list[ss.Request]:
  """Returns a request for each prompt, with its output if that is forced."""
  sampling = shared_flags.sampling()
  encoded = benchmark_run.encode(target, prompts, sampling.max_new_tokens)
  requests = [
    ss.Request(token_ids=token_ids, sampling=sampling)
    for _, token_ids in encoded
  ]
  if tree_flags.config().forced_acceptance is None:
    return requests
  known = references.References(target)
  return [known.add_to(request) for request in requests]


def _run(
  target: ss.Model,
  draft: ss.Model,
  waits_for_misses: bool,
  batch_size: int,
  requests: Sequence[ss.Request],
) -> tuple[list[RoundRecord], float]:
  """Decodes all requests; returns the rounds, and the seconds they took."""
  longest = max(len(request.token_ids) for request in requests)
  limit = longest + shared_flags.sampling().max_new_tokens
  tree = dataclasses.replace(
    tree_flags.config(), waits_for_misses=waits_for_misses
  )
  engine = RowEngine(
    target, draft, tree=tree, max_rows=batch_size, max_context=limit
  )
  engine.warm_up()
  for request in requests:
    engine.submit(request)
  records, start = [], time.perf_counter()
  while engine.num_requests:
    records.append(engine.step())
  return records, time.perf_counter() - start


def _settings() -> dict[str, Any]:
  holders = _PROMPTS, _LIMIT, _BATCH_SIZES, _TARGET_SECONDS, _DRAFT_SECONDS
  return {
    **{holder.name: holder.value for holder in holders},
    **shared_flags.to_json(),
  }


if __name__ == '__main__':
  program.run(main)
