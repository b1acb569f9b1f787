"""The engine in virtual time against the simulator.

Items are those of the SmartSpec checklist, part 4d.
"""

import dataclasses
import itertools
import re

import engine_cases
import numpy as np
import pytest
import serving_cases

import swiftspec_jax as ss
from experiments.load import load_replay, load_simulation
from swiftspec_jax.cost_model import measured
from swiftspec_jax.drafters.forced_draft import ForcedDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput
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
  engine = Engine(
    engine_cases.TARGET,
    engine_cases.TARGET,
    sizes=dataclasses.replace(sizes, scheduler=config),
  )
  longest = config.buckets.max_length
  means = {}
  for policy in (
    FixedLength(),
    FixedLength(longest),
    FixedLength(longest, drafts_first=True),
  ):
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
      recorder.summarize(TARGET) for recorder in (real, simulated.recorder)
    )
    assert figures == expected
    assert len(records) > 20
    num_chunks = sum(record.prefills_draft for record in records)
    assert (num_chunks > 0) == isinstance(policy, FixedLength)
    means[policy] = figures['mean_e2e_latency']
  assert len(set(means.values())) == 3


class Machine(load_replay.VirtualTime):
  """A clock of which no cost model knows more than measurements.

  Attributes:
    step_errors: of the costs, one for each step.
  """

  def __init__(self, costs):
    super().__init__(costs, costs.key.buckets)
    self._noise = np.random.default_rng(0)
    self.step_errors = []

  def time_step(self, record):
    step = record.step
    seconds = self._noise.normal(1, 0.05) * machine_seconds(
      step.padded_rows,
      step.padded_query_tokens,
      step.kv_tokens,
      is_plain=len(step.slots) == step.num_query_tokens.sum(),
    )
    self.step_errors.append(
      load_simulation.step_error(
        self._costs, dataclasses.replace(record, seconds=seconds)
      )
    )
    self._now += seconds
    return self._now, seconds


def machine_seconds(rows, tokens, kv_tokens, *, is_plain=False):
  """Neither linear in the tokens nor equal for plain steps."""
  seconds = 0.01 + 0.0005 * rows + 0.002 * tokens**1.2 + 1e-5 * kv_tokens
  return seconds * (0.8 if is_plain else 1.0)


def profile(buckets):
  """Costs of the machine, measured as `profile_costs` does."""
  key = measured.CostKey(
    target='target',
    draft='forced',
    dtype='float32',
    device_kind='cpu',
    num_devices=1,
    buckets=buckets,
  )
  noise = np.random.default_rng(1)
  found = []

  def add(part, seconds, **sizes):
    seconds *= noise.normal(1, 0.05)
    found.append(measured.Measurement(part=part, seconds=seconds, **sizes))

  for rows, kv_tokens in itertools.product(buckets.rows, (0, 160, 640)):
    sizes = {'num_rows': rows, 'kv_tokens': kv_tokens}
    alone = buckets.pad_query_tokens(rows)
    add(
      'plain', machine_seconds(rows, alone, kv_tokens, is_plain=True), **sizes
    )
    for steps in (1, 3):
      add('draft', 0.0, num_draft_steps=steps, **sizes)
    for tokens in buckets.query_tokens:
      seconds = machine_seconds(rows, tokens, kv_tokens)
      add('target', seconds, num_query_tokens=tokens, **sizes)
      add('overhead', 0.0, num_rows=rows, num_query_tokens=tokens)
  return measured.fit(key, found)


def test_the_simulator_ranks_policies_as_the_engine_does():
  """Item 44: with costs and acceptance that were measured."""
  drafts = {'rows': (4,), 'lengths': (0, 1, 2, 3)}
  sizes = engine_cases.make_sizes(query_tokens=(4, 8, 16), drafts=drafts)
  config = dataclasses.replace(sizes.scheduler, shares_prefixes=False)
  engine = Engine(
    engine_cases.TARGET,
    ForcedDraft(acceptance=0.7),
    sizes=dataclasses.replace(sizes, scheduler=config),
    policy=FixedLength(1),
  )
  costs = profile(config.buckets)
  policies = {
    'none': FixedLength,
    'always_1': lambda: FixedLength(1, drafts_first=True),
    'always_3': lambda: FixedLength(3, drafts_first=True),
    'goodput': lambda: Goodput(costs),
  }
  _, requests = draw(1.0, longest_prompt=12)
  for request in requests:
    # For the drafter to know all that they write, and what comes after.
    longer = request.sampling.max_new_tokens + config.buckets.max_length + 1
    sampling = dataclasses.replace(request.sampling, max_new_tokens=longer)
    engine.submit(dataclasses.replace(request, sampling=sampling))
  while engine.num_requests:
    engine.step()
  runs = list(itertools.product((1.0, 100.0), policies))
  real, virtual, step_errors = [], [], []
  for rate, name in runs:
    arrivals, _ = draw(rate, longest_prompt=12)
    engine.policy = policies[name]()
    machine = Machine(costs)
    recorder = load_replay.replay(
      engine, arrivals, requests, machine, lambda record: None
    )
    run = {'policy': name, 'request_rate': rate}
    real.append(run | recorder.summarize(TARGET))
    step_errors += machine.step_errors
  acceptance, _ = load_simulation.measured_acceptance(real)
  for (rate, name), seed in itertools.product(runs, range(5)):
    arrivals, _ = draw(rate, longest_prompt=12)
    drawn = ChainAcceptance(
      arrivals.output_tokens, np.tile(acceptance, (NUM_REQUESTS, 1)), seed
    )
    found = simulate(arrivals, drawn, policies[name](), config, costs)
    figures = found.recorder.summarize(TARGET)
    virtual.append({'policy': name, 'request_rate': rate} | figures)
  # A step takes what was predicted, but for the noise of both.
  assert np.mean(step_errors) < 0.1
  sentence = load_simulation.compare(real, virtual)
  ratio, alike, pairs = re.fullmatch(
    r'.*: ([\d.]+) \(median.*; (\d+) of (\d+) pairs .*', sentence
  ).groups()
  assert float(ratio) == pytest.approx(1, abs=0.1)
  assert alike == pairs, sentence
  assert int(pairs) >= 8
  # It would be noticed.
  latency = 'mean_e2e_latency'
  opposite = [row | {latency: 1 / row[latency]} for row in virtual]
  assert f'; 0 of {pairs} pairs' in load_simulation.compare(real, opposite)


def test_measured_acceptance():
  """Of the policy that verified most; the share of rows with a draft."""
  figures = {
    'mean_num_speculative_tokens': 1.5,
    'acceptance_rate_per_position': [0.8, 0.4, None],
    'chosen_lengths': [25, 0, 75, 0],
  }
  acceptance, coverage = load_simulation.measured_acceptance(
    [{'mean_num_speculative_tokens': 0.0}, figures]
  )
  assert acceptance.tolist() == [0.8, 0.5, 0.0]
  assert coverage == 0.75
