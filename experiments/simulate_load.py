r"""Latency of policies under load, in virtual time.

  python -m experiments.simulate_load --profile=llama-8b-h100 \
    --request_rates=2,10,40,80 --output_dir=results

Serves the same requests under every policy and at every rate, with the
scheduler and the policies of the engine; steps take what the profile says. The
directory gets rows.jsonl (a line for each policy, rate and seed),
provenance.json, latency.png and lengths.png. Ctrl-C keeps what is done.
"""

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import program
from experiments.flags import load_flags, policy_names
from experiments.load import load_output
from experiments.output import benchmark_output
from swiftspec_jax import cost_model, errors, policies, simulator
from swiftspec_jax.cost_model import profiles, storage
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.batch_table import BatchTable
from swiftspec_jax.serving.arrivals import Arrivals
from swiftspec_jax.serving.scheduling.scheduler import (
  Scheduler,
  SchedulerConfig,
)

_PROFILE = flags.DEFINE_string(
  'profile',
  'llama-8b-h100',
  f'Costs of a step: {" or ".join(profiles.PROFILES)} (published), or the file '
  'of a measurement.',
)
_ACCEPTANCE = flags.DEFINE_list(
  'acceptance',
  ['0.7'],
  'Probability that a draft token is accepted if those before it are: one '
  'number, or one for each position, of which the last holds on.',
)
_ACCEPTANCE_SPREAD = flags.DEFINE_float(
  'acceptance_spread',
  0.0,
  'Requests differ: standard deviation of the acceptance between them.',
  lower_bound=0.0,
  upper_bound=0.3,
)
_COVERAGE = flags.DEFINE_float(
  'coverage',
  1.0,
  'Probability that there is a draft at all; below 1 as in prompt lookup.',
  lower_bound=0.0,
  upper_bound=1.0,
)
_SHARPNESS = flags.DEFINE_float(
  'sharpness',
  None,
  'Let the drafter know how certain its tokens are. The smaller, the more its '
  'tokens differ, from above 0.',
  lower_bound=1e-3,
)
_MAX_LENGTH = flags.DEFINE_integer(
  'max_length', 7, 'Longest draft.', lower_bound=0
)
_TREE_SIZES = flags.DEFINE_list(
  'tree_sizes',
  [],
  'Draft trees instead of chains. These are their nodes without the root after '
  'one, two, ... forwards of the draft, as in 3,7,15.',
)
_MAX_ROWS = flags.DEFINE_integer(
  'max_rows', 256, 'Most requests of a step.', lower_bound=1
)
_MAX_QUERY_TOKENS = flags.DEFINE_integer(
  'max_query_tokens', 1024, 'Most tokens that a step feeds.', lower_bound=1
)
_KV_TOKENS = flags.DEFINE_integer(
  'kv_tokens', 2**18, 'Tokens that the cache has room for.', lower_bound=16
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)

_PAGE_SIZE = 16


def main() -> None:
  """Runs the program."""
  costs, buckets = _costs_and_buckets()
  config = SchedulerConfig(
    buckets=buckets,
    num_pages=_KV_TOKENS.value // _PAGE_SIZE,
    max_context=_KV_TOKENS.value,
    page_size=_PAGE_SIZE,
  )
  table = _table(costs, buckets)
  rates = load_flags.request_rates()
  for name in load_flags.policy_names():
    _policy(name, costs, buckets, table)
  _check_fits(config)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  rows: list[dict[str, Any]] = []
  interruption = None
  start = time.perf_counter()
  try:
    _simulate(costs, config, table, rates, rows, directory)
  except KeyboardInterrupt as error:
    interruption = error
  _report(rows, directory, time.perf_counter() - start)
  if interruption is not None:
    raise interruption


def _check_fits(config: SchedulerConfig) -> None:
  """Raises UserError if a request is longer than the cache."""
  for seed in load_flags.seeds():
    arrivals = load_flags.arrivals(1.0, seed)
    longest = (arrivals.prompt_tokens + arrivals.output_tokens).argmax()
    Scheduler(config).submit(
      0,
      int(arrivals.prompt_tokens[longest]),
      int(arrivals.output_tokens[longest]),
    )


def _costs_and_buckets() -> tuple[cost_model.CostModel, StepBuckets]:
  name = _PROFILE.value
  if name not in profiles.PROFILES and pathlib.Path(name).exists():
    measured = storage.load(pathlib.Path(name))
    return measured, measured.key.buckets
  # A plain least-squares fit makes larger batches faster at short contexts.
  costs = profiles.get(name).monotone()
  buckets = StepBuckets.powers_of_two(
    _MAX_ROWS.value, _MAX_QUERY_TOKENS.value, _MAX_LENGTH.value
  )
  if not _TREE_SIZES.value:
    return costs, buckets
  sizes = load_flags.positive_numbers('tree_sizes', _TREE_SIZES.value)
  return costs, StepBuckets(
    rows=buckets.rows,
    query_tokens=buckets.query_tokens,
    lengths=(0, *map(int, sizes)),
    draft_steps=tuple(range(len(sizes) + 1)),
  )


def _conditional_acceptance(buckets: StepBuckets) -> np.ndarray:
  """Returns f64[K], the mean over requests."""
  found = load_flags.positive_numbers('acceptance', _ACCEPTANCE.value)
  if max(found) > 1:
    raise errors.UserError(f'--acceptance: {max(found):g} is more than 1')
  size = max(buckets.max_length, 1)
  return np.array((found + found[-1:] * size)[:size])


def _policy(
  name: str,
  costs: cost_model.CostModel,
  buckets: StepBuckets,
  table: BatchTable,
) -> policies.Policy:
  is_tree = bool(_TREE_SIZES.value)
  return policy_names.make(name, costs, buckets, table, is_tree=is_tree)


def _table(costs: cost_model.CostModel, buckets: StepBuckets) -> BatchTable:
  """Profiles the table for the acceptance and the mean context."""
  trial = load_flags.arrivals(1.0, 0)
  context = trial.prompt_tokens.mean() + trial.output_tokens.mean() / 2
  acceptance = _conditional_acceptance(buckets)
  if _TREE_SIZES.value:
    gains = simulator.node_gains(float(acceptance[0]), buckets.max_length)
    acceptance = gains / np.concatenate([[1.0], gains[:-1]])
  return BatchTable.profile(costs, buckets, acceptance, int(context))


def _acceptance(
  arrivals: Arrivals, buckets: StepBuckets, seed: int
) -> simulator.Acceptance:
  mean = _conditional_acceptance(buckets)
  generator = np.random.default_rng([seed, 1])
  offsets = generator.normal(0, _ACCEPTANCE_SPREAD.value, len(arrivals))
  acceptance = np.clip(mean[None] + offsets[:, None], 0.0, 1.0)
  if _TREE_SIZES.value:
    return simulator.TreeAcceptance(
      arrivals.output_tokens, acceptance[:, 0], buckets.max_length, seed
    )
  return simulator.ChainAcceptance(
    arrivals.output_tokens,
    acceptance,
    seed,
    coverage=_COVERAGE.value,
    sharpness=_SHARPNESS.value,
  )


def _simulate(
  costs: cost_model.CostModel,
  config: SchedulerConfig,
  table: BatchTable,
  rates: Sequence[float],
  rows: list[dict[str, Any]],
  directory: pathlib.Path,
) -> None:
  """Adds a row for each run, to the list and line by line to the file."""

  def run(name, arrivals, acceptance):
    policy = _policy(name, costs, config.buckets, table)
    start = time.perf_counter()
    simulation = simulator.simulate(
      arrivals,
      acceptance,
      policy,
      config,
      costs,
      drafts_by_model=costs.drafts_by_model,
    )
    elapsed = time.perf_counter() - start
    return simulation.recorder, {
      'num_preemptions': simulation.num_preemptions,
      'simulated_requests_per_second': len(arrivals) / elapsed,
    }

  load_output.sweep(
    rates,
    rows,
    directory,
    prepare=lambda arrivals, seed: _acceptance(arrivals, config.buckets, seed),
    run=run,
  )


def _report(
  rows: Sequence[Mapping[str, Any]], directory: pathlib.Path, seconds: float
) -> None:
  """Writes and prints what the rows say."""
  if not rows:
    return
  holders = (
    _PROFILE,
    _ACCEPTANCE,
    _ACCEPTANCE_SPREAD,
    _COVERAGE,
    _SHARPNESS,
    _MAX_LENGTH,
    _TREE_SIZES,
    _MAX_ROWS,
    _MAX_QUERY_TOKENS,
    _KV_TOKENS,
  )
  load_output.report(
    rows,
    directory,
    f'simulated: {_PROFILE.value}, acceptance {",".join(_ACCEPTANCE.value)}',
    {holder.name: holder.value for holder in holders},
  )
  count = sum(row['num_requests'] for row in rows)
  print(
    f'simulated {count} requests in {seconds:.1f} s, '
    f'{count / seconds:.0f} requests/s'
  )
  print(f'written to {directory}')


if __name__ == '__main__':
  program.run(main)
