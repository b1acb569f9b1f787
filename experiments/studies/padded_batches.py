r"""A flat list of tokens against padded batches, in virtual time (XY-Serve).

  python -m experiments.studies.padded_batches --policies=none,fixed_3 \
    --num_programs=12,40 --output_dir=results

Serves the same requests, and computes the steps in different ways. The first
are flat lists, whose sizes were chosen from the steps of other requests for a
number of programs. The next is a flat list whose sizes are powers of two, with
one more between two of them. The last are padded batches: one for all rows, or
one for the rows that decode and one for each prompt. The directory gets what
simulate_load writes, with the columns `system` and `padded_share`, and
sizes.json.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments import program
from experiments.flags import load_flags, size_flags
from experiments.load import load_output, simulated_load
from experiments.output import benchmark_output
from swiftspec_jax import errors
from swiftspec_jax.cost_model.linear import LinearCosts
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.serving.compilation import shape_classes
from swiftspec_jax.simulator import layouts

_NUM_PROGRAMS = flags.DEFINE_list(
  'num_programs',
  ['12', '40'],
  'Numbers of programs of the target to choose sizes for, ascending.',
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """How steps are computed."""

  load: simulated_load.SimulatedLoad
  layout: layouts.Layout


class Counted:
  """A layout that counts the tokens that are computed, padding too."""

  def __init__(self, layout: layouts.Layout):
    self.num_tokens = 0
    self._layout = layout

  def __call__(
    self, step: StepPlan, buckets: StepBuckets
  ) -> list[layouts.ForwardSizes]:
    forwards = self._layout(step, buckets)
    self.num_tokens += sum(forward.num_tokens for forward in forwards)
    return forwards


def main() -> None:
  """Runs the program."""
  numbers = size_flags.read(_NUM_PROGRAMS)
  load = _load()
  rates, policies = load_flags.request_rates(), load_flags.policy_names()
  for name in policies:
    load.policy(name)
  load.check_fits()
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  found = _systems(load, rates, numbers)
  sizes = {
    name: dataclasses.asdict(system.load.buckets)
    for name, system in found.items()
  }
  benchmark_output.write_json(directory / 'sizes.json', sizes)
  rows: list[dict[str, Any]] = []

  def run(name, arrivals, acceptance):
    policy, _, of_system = name.partition(' ')
    system = found[of_system]
    layout = Counted(system.layout)
    recorder, more = system.load.run(policy, arrivals, acceptance, layout)
    padded = 1 - recorder.num_query_tokens / layout.num_tokens
    return recorder, {**more, 'system': of_system, 'padded_share': padded}

  load_output.sweep(
    rates,
    rows,
    directory,
    prepare=load.acceptance,
    run=run,
    names=[f'{policy} {name}' for policy in policies for name in found],
  )
  settings = {**simulated_load.to_json(), _NUM_PROGRAMS.name: numbers}
  load_output.report(rows, directory, simulated_load.title(), settings)
  for row in rows:
    print(
      f'{row["request_rate"]:g}/s  {row["policy"]}: '
      f'{row["padded_share"]:.1%} padding'
    )
  print(f'written to {directory}')


def _load() -> simulated_load.SimulatedLoad:
  """Returns the load with costs that never reward padding.

  A least-squares fit may find that rows make a step faster.
  """
  load = simulated_load.SimulatedLoad()
  costs = load.costs
  if not isinstance(costs, LinearCosts):
    raise errors.UserError(
      'padded batches have sizes that were not measured; name a published '
      '--profile'
    )
  target = dataclasses.replace(costs.target, rows=max(costs.target.rows, 0.0))
  return load.variant(dataclasses.replace(costs, target=target), load.buckets)


def _systems(
  load: simulated_load.SimulatedLoad,
  rates: list[float],
  numbers: Sequence[int],
) -> dict[str, System]:
  """Returns what is compared; sizes are chosen from another seed's steps."""
  shapes: collections.Counter[shape_classes.Shape] = collections.Counter()
  seed = load_flags.seeds().stop
  for rate in rates:
    arrivals = load_flags.arrivals(rate, seed)
    acceptance = load.acceptance(arrivals, seed)
    for policy in load_flags.policy_names():
      recorder, _ = load.run(policy, arrivals, acceptance)
      shapes += recorder.shapes
  chosen = {
    f'flat, {number} programs': System(
      load=load.variant(
        load.costs, shape_classes.choose(shapes, load.buckets, number)
      ),
      layout=layouts.flat,
    )
    for number in numbers
  }
  usual = shape_classes.num_programs(load.buckets)
  return {
    **chosen,
    f'flat, powers of two, {usual} programs': System(
      load=load, layout=layouts.flat
    ),
    'batches by stage': System(load=load, layout=layouts.by_stage),
    'one batch': System(load=load, layout=layouts.one_batch),
  }


if __name__ == '__main__':
  program.run(main)
