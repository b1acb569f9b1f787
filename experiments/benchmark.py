r"""Measures modes of decoding against each other.

  python -m experiments.benchmark --max_new_tokens=128 --output_dir=results
  python -m experiments.benchmark --modes=autoregressive,serial,async \
    --draft=DRAFT --output_dir=results

Every mode decodes every prompt, one at a time. The directory gets
results.jsonl, summary.json and results.png. Ctrl-C keeps what is done, and
--resume goes on with it.
"""

import dataclasses
import pathlib
import time

from absl import flags

from experiments.flags import run_flags
from experiments.measuring import benchmark_run, benchmark_writer, peers
from experiments.output import benchmark_output
from swiftspec_jax import errors
from swiftspec_jax.cli import program, provenance
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import (
  config_file,
  device_flags,
  draft_flags,
  flag_values,
  host_flags,
  policy_flags,
  shared_flags,
  tree_flags,
)
from swiftspec_jax.cli.flags import modes as modes_lib
from swiftspec_jax.runtime import hosts, profiling, sharding

_MODES = flags.DEFINE_list(
  'modes',
  None,
  f'Some of {", ".join(modes_lib.DECODING)}. Default: all that need no '
  '--draft, with --draft all but async.',
)
_PEERS = flags.DEFINE_list(
  'peers',
  [],
  'Also run transformers or llama.cpp on the CPU: some of '
  f'{", ".join(peers.PEERS)}. llama.cpp computes with the numbers of a GGUF '
  'file, so its output is not compared.',
)
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit()
_REPEATS = run_flags.repeats(1, 'How often to measure each prompt.')
_WARMUP = flags.DEFINE_integer(
  'warmup',
  1,
  'Prompts that run before, for a few tokens, and are not counted.',
  lower_bound=0,
)
_WARMUP_TOKENS = 16  # of a prompt; all is compiled already
_OUTPUT_DIR = run_flags.output_dir()
_RESUME = run_flags.resume()


def main() -> None:
  """Runs the program."""
  start = time.perf_counter()
  config_file.apply()
  host_flags.initialize()
  modes = _check_modes()
  samplings = shared_flags.samplings(_REPEATS.value)
  prompts_path = pathlib.Path(_PROMPTS.value)
  prompts = prompts_lib.read_prompts(prompts_path, _LIMIT.value)
  directory = pathlib.Path(_OUTPUT_DIR.value)
  settings = shared_flags.shared_settings(
    prompts_path,
    limit=_LIMIT.value,
    repeats=_REPEATS.value,
    modes=modes,
    **flag_values.of(policy_flags),
  )
  shared_flags.compare_files(modes, str(prompts_path))
  is_first = sharding.is_first_process()
  records = []
  if is_first:
    records = benchmark_output.open_directory(
      directory, settings, resume=_RESUME.value
    )
  done = {*map(tuple, hosts.exchange([x.key for x in records])[0])}
  with profiling.count_compilations() as compilations:
    target = shared_flags.load_target()
    bench = benchmark_run.Bench(target, prompts, shared_flags.sampling())
    runners = _runners(modes, target, bench)
    if is_first:
      benchmark_output.write_settings(directory, settings)
    facts = {
      **provenance.collect(),
      'target_config': target.config.to_json(),
      'dtype': target.dtype.name,
      'num_skipped': len(prompts) - len(bench.encoded),
      'num_resumed': len(records),
      **peers.facts(shared_flags.target_name(), _PEERS.value),
    }
    jobs = benchmark_run.plan(bench.encoded, modes, _REPEATS.value, done)
    num_before = compilations.count

    def report():
      facts['compile_count'] = compilations.count
      facts['compile_count_measured'] = compilations.count - num_before
      facts['total_seconds'] = time.perf_counter() - start
      if is_first:
        _report(records, modes, directory, facts)

    with program.reporting(report):
      benchmark_run.run(
        jobs, runners, samplings, records, directory if is_first else None
      )


def _check_modes() -> list[str]:
  """Returns all modes to be measured, if the flags fit together."""
  modes = list(_MODES.value or shared_flags.default_modes())
  run_flags.check_names('modes', modes, modes_lib.DECODING)
  run_flags.check_names('peers', _PEERS.value, peers.PEERS)
  device_flags.spread(modes)
  shared_flags.check(modes)
  policy_flags.check(modes)
  if _PEERS.value and hosts.is_together():
    raise errors.UserError('--peers run on one host, without --distributed')
  if _PEERS.value:
    peers.check(_PEERS.value)
  return modes + _PEERS.value


def _runners(modes, target, bench) -> dict[str, benchmark_run.Runner]:
  """Returns a runner for each mode, compiled and warmed up."""
  drafts = shared_flags.load_drafts(target, modes)
  forced_acceptance = tree_flags.config().forced_acceptance
  if forced_acceptance is not None:
    bench.warmed(bench.references.decoder)
  runners = {}
  for mode in modes:
    if mode in modes_lib.DECODING:
      decoder = shared_flags.make_decoder(
        mode, target, drafts.get(mode), policy=policy_flags.make(mode)
      )
      runners[mode] = bench.runner(
        bench.warmed(decoder, f'compiling for {mode}'),
        forced_acceptance if mode in modes_lib.PERSISTENT_TREES else None,
      )
  for name in _PEERS.value:
    length = draft_flags.prompt_lookup().num_speculative_tokens
    names = shared_flags.target_name(), shared_flags.draft_name('chain')
    decode = peers.load(name, target, *names, length)
    runners[name] = benchmark_run.Runner(decode=decode)
  jobs = benchmark_run.plan(bench.encoded[: _WARMUP.value], modes, 1)
  sampling = shared_flags.sampling()
  new_tokens = min(sampling.max_new_tokens, _WARMUP_TOKENS)
  brief = dataclasses.replace(sampling, max_new_tokens=new_tokens)
  if jobs:
    benchmark_run.run(jobs, runners, [brief], [], label='warming up')
  return runners


def _report(records, modes, directory, facts) -> None:
  """Writes and prints what the results say."""
  if not records:
    return
  types = facts['dtype']
  if weight_dtype := facts['target_config']['weight_dtype']:
    types = f'weights of {weight_dtype}, {types}'
  benchmark_writer.write(
    directory,
    records,
    modes,
    facts,
    f'{shared_flags.to_json()["target"]}, {types}',
    is_greedy=shared_flags.sampling().temperature == 0,
  )
  print(f'written to {directory}')


if __name__ == '__main__':
  program.run(main)
