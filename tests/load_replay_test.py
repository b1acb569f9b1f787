"""The engine in virtual time against the simulator.

Items are those of the SmartSpec checklist, part 4d.
"""

import dataclasses

import engine_cases
import numpy as np
import serving_cases
from simulate_load_test import row

import swiftspec_jax as ss
from experiments.load import load_replay
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.simulator import ChainAcceptance, simulate
from swiftspec_jax.simulator import arrivals as arrivals_lib
from swiftspec_jax.simulator.load_metrics import LatencyTarget

EAGLE = serving_cases.EAGLE_8B.monotone()
COSTS = dataclasses.replace(
  EAGLE, draft=dataclasses.replace(EAGLE.draft, draft_prefill=0.01)
)
TARGET = LatencyTarget(ttft=1.0, tpot=0.05)
NUM_REQUESTS = 12


def draw(rate, longest_prompt=40):
  """Arrivals at a rate, and requests that do not depend on it."""
  generator = np.random.default_rng(0)
  arrivals = arrivals_lib.Arrivals(
    times=arrivals_lib.poisson(rate, NUM_REQUESTS, seed=0),
    prompt_tokens=generator.integers(2, longest_prompt, NUM_REQUESTS),
    output_tokens=generator.integers(1, 20, NUM_REQUESTS),
  )
  return arrivals, [
    ss.Request(
      token_ids=tuple(generator.integers(0, 90, num_prompt).tolist()),
      sampling=ss.SamplingParams(max_new_tokens=num_output, ignore_eos=True),
    )
    for num_prompt, num_output in zip(
      arrivals.prompt_tokens, arrivals.output_tokens.tolist(), strict=True
    )
  ]


def test_replay_is_the_simulation():
  """The same latencies, where drafts are always right or there are none."""
  arrivals, requests = draw(40.0)
  sizes = engine_cases.make_sizes(drafts=engine_cases.ONE_CONTEXT)
  # The second run has the prompts of the first.
  config = dataclasses.replace(sizes.scheduler, shares_prefixes=False)
  sizes = dataclasses.replace(sizes, scheduler=config)
  engine = Engine(engine_cases.TARGET, engine_cases.TARGET, sizes=sizes)
  longest = config.buckets.max_length
  means = {}
  for length, drafts_first in ((0, False), (longest, False), (longest, True)):
    policy = FixedLength(length, drafts_first=drafts_first)
    records = []
    engine.policy = policy
    clock = load_replay.VirtualTime(COSTS, config.buckets)
    real = load_replay.replay(engine, arrivals, requests, clock, records.append)
    always = ChainAcceptance(
      arrivals.output_tokens, np.ones((NUM_REQUESTS, longest)), seed=0
    )
    simulated = simulate(
      arrivals, always, policy, config, COSTS, drafts_by_model=True
    )
    figures, expected = (
      recorder.summarize(TARGET) for recorder in (real, simulated.recorder)
    )
    assert figures == expected
    assert len(records) > 20
    num_chunks = sum(record.prefills_draft for record in records)
    assert (num_chunks > 0) == (length > 0)
    means[policy] = figures['mean_e2e_latency']
  assert len(set(means.values())) == 3


def test_rankings_are_compared():
  real = [row('none', 1.0, 1.0), row('fixed_1', 1.0, 2.0)]
  real.append(row('goodput', 1.0, 4.0))
  latency = 'mean_e2e_latency'
  alike = [r | {latency: 2 * r[latency]} for r in real]
  found = load_replay.compare(real, alike)
  assert ': 2.00 (median' in found
  assert '; 3 of 3 pairs' in found
  opposite = [r | {latency: 1 / r[latency]} for r in real]
  assert '; 0 of 3 pairs' in load_replay.compare(real, opposite)


def test_measured_acceptance():
  """Of the policy that verified most; the share of rows with a draft."""
  figures = {
    'mean_num_speculative_tokens': 1.5,
    'acceptance_rate_per_position': [0.8, 0.4, None],
    'chosen_lengths': [25, 0, 75, 0],
  }
  acceptance, coverage = load_replay.measured_acceptance(
    [{'mean_num_speculative_tokens': 0.0}, figures]
  )
  assert acceptance.tolist() == [0.8, 0.5, 0.0]
  assert coverage == 0.75
