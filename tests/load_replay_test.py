"""The engine in virtual time against the simulator."""

import dataclasses

import engine_cases
import numpy as np
import serving_cases

import swiftspec_jax as ss
from experiments import load_replay
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.no_speculation import NoSpeculation
from swiftspec_jax.serving import arrivals as arrivals_lib
from swiftspec_jax.serving.engine import Engine
from swiftspec_jax.serving.load_metrics import LatencyTarget
from swiftspec_jax.simulator import ChainAcceptance, simulate

EAGLE = serving_cases.EAGLE_8B.monotone()
COSTS = dataclasses.replace(
  EAGLE, draft=dataclasses.replace(EAGLE.draft, intake=0.01)
)
NUM_REQUESTS = 12


def test_replay_is_the_simulation():
  """The same latencies, where drafts are always right or there are none."""
  generator = np.random.default_rng(0)
  arrivals = arrivals_lib.Arrivals(
    times=arrivals_lib.poisson(40.0, NUM_REQUESTS, seed=0),
    prompt_tokens=generator.integers(2, 40, NUM_REQUESTS),
    output_tokens=generator.integers(1, 20, NUM_REQUESTS),
  )
  requests = [
    ss.Request(
      token_ids=tuple(generator.integers(0, 90, num_prompt).tolist()),
      sampling=ss.SamplingParams(max_new_tokens=num_output, ignore_eos=True),
    )
    for num_prompt, num_output in zip(
      arrivals.prompt_tokens, arrivals.output_tokens.tolist(), strict=True
    )
  ]
  sizes = engine_cases.make_sizes()
  # The second run has the prompts of the first.
  config = dataclasses.replace(sizes.scheduler, shares_prefixes=False)
  engine = Engine(
    engine_cases.TARGET,
    engine_cases.TARGET,
    sizes=dataclasses.replace(sizes, scheduler=config),
  )
  longest = config.buckets.max_length
  means = {}
  for policy in (NoSpeculation(), FixedLength(longest)):
    records = []
    engine.policy = policy
    real = load_replay.replay(
      engine,
      arrivals,
      requests,
      load_replay.VirtualTime(COSTS, config.buckets),
      records.append,
    )
    always = ChainAcceptance(
      arrivals.output_tokens, np.ones((NUM_REQUESTS, longest)), seed=0
    )
    simulated = simulate(
      arrivals, always, policy, config, COSTS, drafts_by_model=True
    )
    figures, expected = (
      recorder.summarize(LatencyTarget(ttft=1.0, tpot=0.05))
      for recorder in (real, simulated.recorder)
    )
    assert figures == expected
    assert len(records) > 20
    num_chunks = sum(record.takes_in for record in records)
    assert (num_chunks > 0) == isinstance(policy, FixedLength)
    means[policy] = figures['mean_e2e_latency']
  assert len(set(means.values())) == 2
