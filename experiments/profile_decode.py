"""How close decoding comes to what the machine allows.

  python -m experiments.profile_decode --prompt_tokens=1000
  python -m experiments.profile_decode --mode=serial --output_dir=DIR

Measures in turn, several times, the memory bandwidth, the bare jitted step, the
step with the host loop around it, and prefill. Plain decoding reads every
weight once a token, so the bandwidth bounds its rate. Prints the medians, and
writes them with their provenance when --output_dir is given.

With --mode it takes the rounds of a token tree apart instead: how long each
part of target and draft takes, over the first prompts that are shipped.
docs/how_it_works/decoding.md says how to read the table, which rows.jsonl gets.
"""

import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

import swiftspec_jax as ss
from experiments.flags import run_flags
from experiments.measuring import (
  benchmark_report,
  benchmark_run,
  round_profile,
)
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program, provenance, step_times
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import config_file, modes, shared_flags
from swiftspec_jax.runtime import profiling

_PROMPT_TOKENS = flags.DEFINE_integer(
  'prompt_tokens', 1000, 'Length of the prompt for prefill.', lower_bound=2
)
_NUM_STEPS = flags.DEFINE_integer(
  'num_steps', 64, 'Decoding steps of one measurement.', lower_bound=8
)
_REPEATS = run_flags.repeats(
  5, 'Measurements of which the median counts; with --mode prompts.'
)
_MODE = flags.DEFINE_enum(
  'mode',
  None,
  modes.PERSISTENT_TREES,
  'Take the rounds of this mode apart.',
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir',
  None,
  'Where profile.json goes, and rows.jsonl of --mode; none is written by '
  'default.',
)

_SHORT_PROMPT = 32


def main() -> None:
  """Measures, prints and writes."""
  config_file.apply()
  if _MODE.value:
    _profile_rounds(_MODE.value)
  else:
    _profile_steps()


def _profile_steps() -> None:
  """Measures plain decoding."""
  shared_flags.check(['autoregressive'])
  target = shared_flags.load_target()
  longest = max(_PROMPT_TOKENS.value, _SHORT_PROMPT + _NUM_STEPS.value)
  if longest >= target.config.max_context:
    raise errors.UserError(
      f'--prompt_tokens={_PROMPT_TOKENS.value} and '
      f'--num_steps={_NUM_STEPS.value} do not fit into the context of '
      f'{target.config.max_context} tokens'
    )
  measurements = _measurements(target)
  for measure in measurements.values():
    measure()  # compiles
  values = {name: [] for name in measurements}
  for _ in tqdm(range(_REPEATS.value), desc='measuring', unit='round'):
    for name, measure in measurements.items():
      values[name].append(measure())
  medians = {name: statistics.median(v) for name, v in values.items()}
  report = _report(medians, target.num_bytes)
  for line, value in report.items():
    print(f'{line:40} {value:10.3f}')
  if _OUTPUT_DIR.value:
    _write(pathlib.Path(_OUTPUT_DIR.value), report)


def _measurements(target: ss.Model) -> dict[str, Callable[[], float]]:
  """Returns functions that measure once: seconds, or bytes per second."""
  decoder = ss.Decoder(target)
  long_decoder = ss.Decoder(target)
  # Any tokens do: the time does not depend on them.
  decode = _request(range(_SHORT_PROMPT), _NUM_STEPS.value)
  prefill = _request(range(_PROMPT_TOKENS.value), 1)
  return {
    'bandwidth': profiling.measure_read_bandwidth,
    'step': lambda: _step_seconds(decoder, decode),
    'loop': lambda: 1 / _run(decoder, decode).tokens_per_second,
    'prefill': lambda: _run(long_decoder, prefill).ttft_seconds,
  }


def _request(token_ids: Sequence[int], new_tokens: int) -> ss.Request:
  return ss.Request(
    token_ids=tuple(token_ids),
    sampling=ss.SamplingParams(max_new_tokens=new_tokens, ignore_eos=True),
  )


def _run(decoder: ss.Decoder, request: ss.Request) -> ss.GenerationStats:
  return benchmark_run.make_decode(decoder)(request).stats


def _step_seconds(decoder: ss.Decoder, request: ss.Request) -> float:
  """Median time of a step alone, with the caches that `request` needs."""
  _run(decoder, request)
  return step_times.target_step_seconds(decoder, num_timings=_NUM_STEPS.value)


def _report(medians: dict[str, float], num_bytes: int) -> dict[str, float]:
  floor = num_bytes / medians['bandwidth']
  return {
    'read bandwidth (GB/s)': medians['bandwidth'] / 1e9,
    'weights (MB)': num_bytes / 1e6,
    'floor of a step (ms)': floor * 1e3,
    'bare step (ms)': medians['step'] * 1e3,
    'share of the rate of the floor': floor / medians['step'],
    'step in the loop (ms)': medians['loop'] * 1e3,
    'overhead of the loop': medians['loop'] / medians['step'] - 1,
    'decoding (tokens/s)': 1 / medians['loop'],
    'prefill (tokens/s)': _PROMPT_TOKENS.value / medians['prefill'],
  }


def _profile_rounds(mode: str) -> None:
  """Takes the rounds of a tree apart."""
  if _PROMPT_TOKENS.present:
    raise errors.UserError(
      f'--prompt_tokens is not used with --mode={mode}; leave it out'
    )
  shared_flags.check([mode])
  # A program from the cache may have no names, or former ones.
  jax.config.update('jax_compilation_cache_include_metadata_in_key', True)
  target = shared_flags.load_target()
  draft = shared_flags.load_drafts(target, [mode])[mode]
  prompts = prompts_lib.read_prompts(run_flags.DEFAULT_PROMPTS, _REPEATS.value)
  sampling = ss.SamplingParams(max_new_tokens=_NUM_STEPS.value)
  bench = benchmark_run.Bench(target, prompts, sampling)
  timeline = ss.Timeline()
  decoder = shared_flags.make_decoder(mode, target, draft, timeline=timeline)
  rows = round_profile.measure(
    bench.warmed(ss.Decoder(target)),
    bench.warmed(decoder),
    timeline,
    (target, draft),
    [_request(token_ids, _NUM_STEPS.value) for _, token_ids in bench.encoded],
  )
  columns = {
    'part': ('part',),
    'ms': ('seconds', '.2f', 1e3),
    'share of a round': ('share', '.3f'),
  }
  print(benchmark_report.table_of(rows, columns, num_names=1))
  step = next(row for row in rows if row['part'] == 'plain_step')
  print(f'a round takes {1 / step["share"]:.2f} plain steps')
  if _OUTPUT_DIR.value:
    directory = pathlib.Path(_OUTPUT_DIR.value)
    _write(directory, {'mode': mode, **shared_flags.to_json()})
    output_files.write_lines(directory / 'rows.jsonl', rows)


def _write(directory: pathlib.Path, report: dict[str, Any]) -> None:
  with output_files.writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
  output_files.write_json(
    directory / 'profile.json', {**report, 'provenance': provenance.collect()}
  )


if __name__ == '__main__':
  program.run(main)
