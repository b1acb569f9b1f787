"""Promises of time per token: what policies see of them, and their figures."""

import dataclasses

import numpy as np
import pytest
import serving_cases as cases
from simulator_test import requests

from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.simulator import ChainAcceptance, simulate
from swiftspec_jax.simulator import arrivals as arrivals_lib
from swiftspec_jax.simulator.arrivals import Arrivals
from swiftspec_jax.simulator.load_metrics import LatencyTarget, LoadRecorder


class Watching(FixedLength):
  """Keeps what it saw of the rows."""

  def __init__(self):
    super().__init__(2)
    self.seen = []

  def observe(self, outcome):
    view = outcome.view
    self.seen.append(
      (view.request_ids, view.num_output, view.slo_tpots, view.decode_seconds)
    )


def test_views_know_promises_and_times():
  """Also of requests that lost their slot meanwhile."""
  buckets = StepBuckets.powers_of_two(4, 32, 2)
  config = SchedulerConfig(
    buckets=buckets, num_pages=20, max_context=320, page_size=16
  )
  arrivals = dataclasses.replace(
    requests(50.0, 12, prompt=64, output=40),
    slo_tpots=arrivals_lib.draw_slos({0.02: 1, 0.1: 1}, 12, 0),
  )
  policy = Watching()
  luck = ChainAcceptance(arrivals.output_tokens, np.full((12, 2), 0.6), 0)
  simulation = simulate(arrivals, luck, policy, config, cases.EAGLE_8B)
  assert simulation.num_preemptions > 0
  num_output = np.zeros(12, int)
  for request_ids, seen, slo_tpots, seconds in policy.seen:
    np.testing.assert_array_equal(slo_tpots, arrivals.slo_tpots[request_ids])
    assert (seen >= num_output[request_ids]).all()
    assert (seconds[seen > 1] > 0).all()
    assert (seconds < simulation.recorder.last.max()).all()
    num_output[request_ids] = seen
  assert (num_output < arrivals.output_tokens).all()
  assert (num_output >= arrivals.output_tokens - 3).all()


def test_promises_are_counted():
  """Tokens at 1, 2, 3 s and so on; two of three keep theirs."""
  arrivals = Arrivals(
    times=np.zeros(3),
    prompt_tokens=np.ones(3, np.int64),
    output_tokens=np.full(3, 9),
    slo_tpots=np.array([1.5, 0.5, 1.5]),
  )
  recorder = LoadRecorder(arrivals, 1)
  recorder.first[:], recorder.last[:] = 1.0, (4.0, 4.0, 9.0)
  recorder.num_output[:] = 4, 4, 9
  recorder.note_finished(np.arange(3))
  figures = recorder.summarize(LatencyTarget(ttft=1.0, tpot=0.1))
  assert figures['tpot_attainment'] == pytest.approx(2 / 3)
  assert figures['slo_attainment'] == pytest.approx(2 / 3)
  assert figures['kept_throughput'] == pytest.approx(13 / 9)
  assert figures['tpot_attainment_1500ms'] == 1
  assert figures['tpot_attainment_500ms'] == 0
