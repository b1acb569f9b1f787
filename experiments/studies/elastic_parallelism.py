"""Simulates elastic sequence parallelism beside static groups (LoongServe).

  python -m experiments.studies.elastic_parallelism --output_dir=DIR

Four instances of two A800 each serve Llama-2-7B, with costs from published
sizes. The table has the highest rate at which 90 % of the requests end within
25 times of their latency alone.
"""

import functools
import pathlib
from collections.abc import Callable

import numpy as np
from absl import flags

from experiments import program
from experiments.output import benchmark_output, provenance
from swiftspec_jax.planning.elastic import PrefillCosts
from swiftspec_jax.serving import arrivals
from swiftspec_jax.simulator import elastic

_NUM_REQUESTS = flags.DEFINE_integer(
  'num_requests', 150, 'Requests of each run.', lower_bound=1
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'Directory of rows.jsonl.', required=True
)

NUM_INSTANCES = 4
_SLOWDOWN = 25.0  # of latency alone, as in the paper
_SHARE = 0.9
# Two A800 at half of their operations and 0.7 of their bandwidth.
_FLOPS, _BANDWIDTH, _LINK = 0.5 * 2 * 312e12, 0.7 * 2 * 2.039e12, 400e9
_PARAMETERS, _LAYERS, _WIDTH = 6.74e9, 32, 4096
_KV_BYTES = 4 * _LAYERS * _WIDTH
# Shortest and longest prompts and outputs, log-uniform; prompts as published.
LAWS = {
  'long (L-Eval)': ((2_700, 210_000), (10, 500)),
  'longest (LV-Eval)': ((15_000, 490_000), (10, 500)),
  'mixed': ((100, 200_000), (10, 1_000)),
}


def costs() -> elastic.ElasticCosts:
  """Returns those of an instance."""
  token = 2 * _PARAMETERS / _FLOPS
  pair = 2 * _WIDTH * _LAYERS / _FLOPS  # causal
  move = _KV_BYTES / _LINK
  prefill = {
    p: (0.005 + 0.01 * p, token / p + move * (p - 1) / p, pair / p)
    for p in range(1, NUM_INSTANCES + 1)
  }
  return elastic.ElasticCosts(
    prefill=PrefillCosts(coefficients=prefill),
    decode=0.005 + 2 * _PARAMETERS / _BANDWIDTH,
    exchange=0.001,
    row=token,
    kv_token=_KV_BYTES / _BANDWIDTH,
    move_token=move,
    room=int((0.9 * 160e9 - 2 * _PARAMETERS) / _KV_BYTES),
    batch_tokens=4096,
  )


def systems() -> dict[str, Callable[..., np.ndarray]]:
  """Returns what simulates each system."""
  static = functools.partial(
    elastic.simulate_group, num_instances=NUM_INSTANCES
  )
  chunked = functools.partial(static, chunk_tokens=8192)

  def of(policy):
    return functools.partial(
      elastic.simulate_elastic, num_instances=NUM_INSTANCES, policy=policy
    )

  return {
    'static': static,
    'chunked': chunked,
    'two keep': functools.partial(chunked, num_keeping=2),
    'elastic': of(elastic.Elastic()),
    'without scaling up': of(elastic.Elastic(scales_up=False)),
    'kept evenly': of(elastic.Elastic(keeps_fewest=False)),
  }


def make_arrivals(law: str, rate: float, count: int) -> arrivals.Arrivals:
  """Returns requests, the same at every rate."""
  generator = np.random.default_rng(0)
  prompts, outputs = (
    np.exp(generator.uniform(*np.log(bounds), count)).astype(int).clip(1)
    for bounds in LAWS[law]
  )
  return arrivals.Arrivals(
    times=arrivals.poisson(rate, count, 0),
    prompt_tokens=prompts,
    output_tokens=outputs,
  )


def highest_rate(
  simulate: Callable[..., np.ndarray], law: str, count: int
) -> float:
  """Returns the requests a second at which enough end in time."""
  low, high = 1e-3, 1e4
  instance = costs()
  while high > 1.03 * low:
    rate = (low * high) ** 0.5
    requests = make_arrivals(law, rate, count)
    slowdown = simulate(requests, instance) / elastic.unloaded_seconds(
      requests, instance
    )
    if np.mean(slowdown <= _SLOWDOWN) >= _SHARE:
      low = rate
    else:
      high = rate
  return low


def main() -> None:
  """Runs the program."""
  directory = pathlib.Path(_OUTPUT_DIR.value)
  with program.writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
  for law in LAWS:
    rates = {
      name: highest_rate(simulate, law, _NUM_REQUESTS.value)
      for name, simulate in systems().items()
    }
    benchmark_output.append_line(
      directory / 'rows.jsonl', {'law': law, **rates}
    )
    cells = (f'{name} {rate:.3g}' for name, rate in rates.items())
    print(f'{law}: {", ".join(cells)} requests a second', flush=True)
  benchmark_output.write_json(
    directory / 'provenance.json', provenance.collect()
  )


if __name__ == '__main__':
  program.run(main)
