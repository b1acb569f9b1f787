r"""Latency of policies under load, on the devices at hand.

  python -m experiments.profile_costs --mode=prompt_lookup --output=costs.json
  python -m experiments.serve_load --mode=prompt_lookup --costs=costs.json \
    --request_rates=0.2,0.5,1 --num_requests=40 --output_dir=results

Requests arrive in real time, whether or not the engine keeps up; with
--virtual_time in the time that --costs predict. The prompts are those of a
file, in turn; only the numbers of output tokens are drawn. Every run begins
with a drafter that has seen no request, except in mode forced. Within a run
prompts repeat if there are more requests than prompts: num_repeated_prompts.
The directory gets rows.jsonl (a line for each policy, rate and seed, with the
columns of simulate_load), steps.jsonl for choose_sizes, provenance.json,
latency.png and lengths.png. With --costs the simulator then serves the same
requests: simulated.jsonl. Ctrl-C keeps what is done.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

import swiftspec_jax as ss
from experiments.flags import load_flags, run_flags
from experiments.load import load_output, load_replay
from experiments.measuring import benchmark_run
from swiftspec_jax import errors, simulator
from swiftspec_jax.cli import output_files, program
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import (
  cost_flags,
  engine_flags,
  flag_values,
  modes,
  shared_flags,
)
from swiftspec_jax.engine.engine import Engine, StepRecord
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.simulator.arrivals import Arrivals

_PROMPTS = run_flags.prompts()
_OUTPUT_DIR = run_flags.output_dir()
_VIRTUAL_TIME = flags.DEFINE_bool(
  'virtual_time',
  False,
  'Steps take what --costs say of them, and idle time passes at once. So '
  'latencies do not depend on what else this machine does.',
)


def main() -> None:
  """Runs the program."""
  declared = engine_flags.sizes()
  rates, names = load_flags.request_rates(), load_flags.policy_names()
  cost_flags.check(names)
  _check_virtual_time()
  prompts = prompts_lib.read_prompts(pathlib.Path(_PROMPTS.value))
  directory = pathlib.Path(_OUTPUT_DIR.value)
  output_files.open_directory(directory)
  # In virtual time the host takes none, and each step is read at its end.
  engine, target = engine_flags.make_engine(
    declared, runs_ahead=not _VIRTUAL_TIME.value
  )
  longest = max(
    int(load_flags.arrivals(1.0, seed).output_tokens.max())
    for seed in load_flags.seeds()
  )
  encoded = [ids for _, ids in benchmark_run.encode(target, prompts, longest)]
  policies = cost_flags.Policies(engine, target, declared)
  for name in names:
    policies.make(name)
  engine.programs.compile_all(show_progress='compiling')
  if engine_flags.mode() == modes.FORCED:
    _write_down(engine, encoded)
  rows: list[dict[str, Any]] = []

  def report():
    if rows:
      title = f'{target.name}, drafts: {engine.drafter.name}'
      if _VIRTUAL_TIME.value:
        title += ', virtual time'
      own = {holder.name: holder.value for holder in (_PROMPTS, _VIRTUAL_TIME)}
      settings = own | flag_values.of(cost_flags) | engine_flags.to_json()
      load_output.report(rows, directory, title, settings)
      print(_repetition(rows))
      if policies.costs is not None and not engine_flags.is_tree():
        _simulate(engine, policies, encoded, rows, directory)
      print(f'written to {directory}')

  with program.reporting(report):
    _serve(engine, policies, encoded, rates, rows, directory)


def _check_virtual_time() -> None:
  """Raises UserError for flags that mean nothing with --virtual_time."""
  if not _VIRTUAL_TIME.value:
    return
  cost_flags.require('--virtual_time')
  if flags.FLAGS['run_ahead'].present:
    raise errors.UserError(
      '--run_ahead has no effect with --virtual_time, in which the host takes '
      'no time; leave it out'
    )


def _repetition(rows: Sequence[dict[str, Any]]) -> str:
  """Returns a sentence on prompts that come more than once in a run."""
  num_repeated = sum(row['num_repeated_prompts'] for row in rows)
  num_requests = sum(row['num_requests'] for row in rows)
  return (
    f'{num_repeated} of {num_requests} requests have a prompt that came before '
    'in their run'
  )


def _write_down(engine: Engine, encoded: Sequence[tuple[int, ...]]) -> None:
  """Serves all requests once, so that the drafter knows their outputs."""
  # Only policies that draft show it the texts.
  engine.policy = FixedLength(1)
  for seed in load_flags.seeds():
    for request in _requests(load_flags.arrivals(1.0, seed), encoded):
      engine.submit(request)
  while engine.num_requests:
    engine.step()


def _serve(
  engine: Engine,
  policies: cost_flags.Policies,
  encoded: Sequence[tuple[int, ...]],
  rates: Sequence[float],
  rows: list[dict[str, Any]],
  directory: pathlib.Path,
) -> None:
  """Adds a row for each run, to the list and line by line to the file."""

  def run(name, arrivals, requests):
    engine.policy = policies.make(name)
    if engine_flags.mode() != modes.FORCED:
      engine.reset_drafters()
    before = engine.scheduler.num_preemptions
    records: list[StepRecord] = []
    clock = load_replay.RealTime()
    if _VIRTUAL_TIME.value:
      buckets = engine.scheduler.config.buckets
      clock = load_replay.VirtualTime(policies.costs, buckets)
    recorder = load_replay.replay(
      engine, arrivals, requests, clock, records.append
    )
    count = engine.scheduler.num_preemptions - before
    num_prompts = len({request.token_ids for request in requests})
    more: dict[str, Any] = {
      'num_preemptions': count,
      'num_repeated_prompts': len(requests) - num_prompts,
      **load_replay.of_steps(records),
    }
    if _VIRTUAL_TIME.value:
      more['host_seconds_per_step'] = None  # is real, and so not repeatable
    if policies.costs is not None:
      more['step_time_error'] = statistics.median(
        load_replay.step_error(policies.costs, record) for record in records
      )
    return recorder, more

  load_output.sweep(
    rates,
    rows,
    directory,
    prepare=lambda arrivals, seed: _requests(arrivals, encoded),
    run=run,
  )


def _requests(
  arrivals: Arrivals, encoded: Sequence[tuple[int, ...]]
) -> list[ss.Request]:
  """Returns prompts in turn, whose outputs have the drawn lengths."""
  sampling = shared_flags.sampling()
  return [
    ss.Request(
      token_ids=encoded[i % len(encoded)],
      sampling=dataclasses.replace(
        sampling, seed=sampling.seed + i, max_new_tokens=size, ignore_eos=True
      ),
    )
    for i, size in enumerate(arrivals.output_tokens.tolist())
  ]


def _simulate(
  engine: Engine,
  policies: cost_flags.Policies,
  encoded: Sequence[tuple[int, ...]],
  rows: Sequence[dict[str, Any]],
  directory: pathlib.Path,
) -> None:
  """Serves the requests of all rows in virtual time, and compares."""
  if not any(row['mean_num_speculative_tokens'] for row in rows):
    return
  acceptance, coverage = load_replay.measured_acceptance(rows)
  config, costs = engine.scheduler.config, policies.costs
  simulated = []
  for row in rows:
    run = {name: row[name] for name in ('policy', 'request_rate', 'seed')}
    arrivals = load_flags.arrivals(run['request_rate'], run['seed'])
    sizes = np.resize([len(ids) for ids in encoded], len(arrivals))
    room = config.max_context - sizes
    served = dataclasses.replace(
      arrivals,
      prompt_tokens=sizes,
      output_tokens=np.minimum(arrivals.output_tokens, room),
    )
    drawn = simulator.ChainAcceptance(
      served.output_tokens,
      np.tile(acceptance, (len(served), 1)),
      run['seed'],
      coverage=coverage,
    )
    found = simulator.simulate(
      served,
      drawn,
      policies.make(run['policy']),
      config,
      costs,
      drafts_by_model=costs.drafts_by_model,
    )
    figures = found.recorder.summarize(load_flags.latency_target())
    simulated.append({**run, **figures})
    output_files.append_line(directory / 'simulated.jsonl', simulated[-1])
  print(load_replay.compare(rows, simulated))
  off = statistics.median(row['step_time_error'] for row in rows)
  print(f'times of steps are off by {off:.1%} (median)')


if __name__ == '__main__':
  program.run(main)
