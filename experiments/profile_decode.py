"""How close decoding comes to what the machine allows.

  python -m experiments.profile_decode --prompt_tokens=1000 --peers=hf

Measures in turn, several times: the memory bandwidth (plain decoding reads
every weight once a token, so it bounds the rate), the bare jitted step, the
step with the host loop around it, and prefill; with --peers=hf Hugging Face
transformers on the same weights, too. Prints the medians, and writes them
with their provenance when --output_dir is given.
"""

import pathlib
import statistics
import time
from collections.abc import Callable

import jax
from absl import flags
from tqdm import tqdm

import swiftspec_jax as ss
from experiments import (
  benchmark_output,
  benchmark_run,
  config_file,
  peers,
  program,
  provenance,
)
from experiments import flags as shared_flags
from swiftspec_jax import errors, profiling

_PROMPT_TOKENS = flags.DEFINE_integer(
  'prompt_tokens', 1000, 'Length of the prompt for prefill.', lower_bound=2
)
_NUM_STEPS = flags.DEFINE_integer(
  'num_steps', 64, 'Decoding steps of one measurement.', lower_bound=8
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 5, 'Measurements of which the median counts.', lower_bound=1
)
_PEERS = flags.DEFINE_enum(
  'peers', None, ['hf'], 'Also measure Hugging Face transformers (torch).'
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'Where profile.json goes; none is written by default.'
)

_SHORT_PROMPT = 32


def main() -> None:
  """Measures, prints and writes."""
  config_file.apply()
  shared_flags.check(['autoregressive'])
  if _PEERS.value:
    peers.check()
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
  decode = _request(_SHORT_PROMPT, _NUM_STEPS.value)
  prefill = _request(_PROMPT_TOKENS.value, 1)
  measurements = {
    'bandwidth': lambda: profiling.measure_read_bandwidth(num_repeats=3),
    'step': lambda: _step_seconds(decoder, decode),
    'loop': lambda: _run(decoder, decode).decode_seconds / _NUM_STEPS.value,
    'prefill': lambda: _run(long_decoder, prefill).ttft_seconds,
  }
  if _PEERS.value:
    run = peers.load(target, num_speculative_tokens=1)['hf']
    measurements['hf_token'] = lambda: 1 / run(decode).stats.tokens_per_second
    measurements['hf_prefill'] = lambda: run(prefill).stats.ttft_seconds
  return measurements


def _request(prompt_tokens: int, new_tokens: int) -> ss.Request:
  # Any tokens do: the time does not depend on them.
  return ss.Request(
    token_ids=tuple(range(prompt_tokens)),
    sampling=ss.SamplingParams(max_new_tokens=new_tokens, ignore_eos=True),
  )


def _run(decoder: ss.Decoder, request: ss.Request) -> ss.GenerationStats:
  return benchmark_run.make_decode(decoder)(request).stats


def _step_seconds(decoder: ss.Decoder, request: ss.Request) -> float:
  """Median time of a step alone, on the rows that `request` has left."""
  _run(decoder, request)
  seconds = []
  for _ in range(_NUM_STEPS.value):
    start = time.perf_counter()
    jax.block_until_ready(decoder.dispatch())
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds)


def _report(medians: dict[str, float], num_bytes: int) -> dict[str, float]:
  floor = num_bytes / medians['bandwidth']
  report = {
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
  if 'hf_token' in medians:
    report |= {
      'transformers decoding (tokens/s)': 1 / medians['hf_token'],
      'ratio to transformers': medians['hf_token'] / medians['loop'],
      'transformers prefill (tokens/s)': (
        _PROMPT_TOKENS.value / medians['hf_prefill']
      ),
      'ratio of prefill': medians['hf_prefill'] / medians['prefill'],
    }
  return report


def _write(directory: pathlib.Path, report: dict[str, float]) -> None:
  with program.writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
  benchmark_output.write_json(
    directory / 'profile.json', {**report, 'provenance': provenance.collect()}
  )


if __name__ == '__main__':
  program.run(main)
