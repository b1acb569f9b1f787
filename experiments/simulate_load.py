r"""Latency of policies under load, in virtual time.

  python -m experiments.simulate_load --profile=llama-8b-h100 \
    --request_rates=2,10,40,80 --output_dir=results

Serves the same requests under every policy and at every rate, with the
scheduler and the policies of the engine; steps take what the profile says. The
directory gets rows.jsonl (a line for each policy, rate and seed), steps.jsonl
for choose_sizes, provenance.json, latency.png and lengths.png. Ctrl-C keeps
what is done.
"""

import pathlib
import time
from typing import Any

from absl import flags

from experiments.flags import load_flags, run_flags
from experiments.load import load_output, simulated_load
from swiftspec_jax.cli import output_files, program
from swiftspec_jax.cli.flags import flag_values

_COVERAGE = flags.DEFINE_float(
  'coverage',
  1.0,
  'Probability that there is a draft at all; below 1 as in prompt lookup.',
  lower_bound=0.0,
  upper_bound=1.0,
)
_OUTPUT_DIR = run_flags.output_dir()


def main() -> None:
  """Runs the program."""
  load = simulated_load.SimulatedLoad(_COVERAGE.value)
  rates = load_flags.request_rates()
  for name in load_flags.policy_names():
    load.policy(name)
  load.check_fits()
  directory = pathlib.Path(_OUTPUT_DIR.value)
  output_files.open_directory(directory)
  rows: list[dict[str, Any]] = []
  start = time.perf_counter()

  def report():
    if not rows:
      return
    seconds = time.perf_counter() - start
    settings = flag_values.of(simulated_load)
    settings |= {_COVERAGE.name: _COVERAGE.value}
    load_output.report(rows, directory, simulated_load.title(), settings)
    count = sum(row['num_requests'] for row in rows)
    print(
      f'simulated {count} requests in {seconds:.1f} s, '
      f'{count / seconds:.0f} requests/s'
    )
    print(f'written to {directory}')

  with program.reporting(report):
    load_output.sweep(
      rates, rows, directory, prepare=load.acceptance, run=load.run
    )


if __name__ == '__main__':
  program.run(main)
