"""The simulator against theory, and what it says of policies.

Items are those of the SmartSpec checklist, part 4d.
"""

import dataclasses

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.estimators import (
  ChainEstimator,
  TreeEstimator,
)
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.simulator import ChainAcceptance, TreeAcceptance, simulate
from swiftspec_jax.simulator import arrivals as arrivals_lib
from swiftspec_jax.simulator.arrivals import Arrivals
from swiftspec_jax.simulator.load_metrics import LatencyTarget

COSTS = cases.EAGLE_8B.monotone()
BUCKETS = StepBuckets.powers_of_two(256, 1024, 7)
CONFIG = SchedulerConfig(buckets=BUCKETS, num_pages=2**14, max_context=4096)
TARGET = LatencyTarget(ttft=1.0, tpot=0.05)


def requests(rate, count, seed=0, prompt=256, output=64, spread=0.5):
  return Arrivals(
    times=arrivals_lib.poisson(rate, count, seed),
    prompt_tokens=arrivals_lib.draw_lengths(
      prompt, spread, count, seed, 'prompt'
    ),
    output_tokens=arrivals_lib.draw_lengths(
      output, spread, count, seed, 'output'
    ),
  )


def luck(arrivals, acceptance=0.7, seed=0, **options):
  acceptance = np.broadcast_to(
    np.reshape(acceptance, (-1, 1)), (len(arrivals), 7)
  )
  return ChainAcceptance(arrivals.output_tokens, acceptance, seed, **options)


def serve(arrivals, policy, acceptance=None, costs=COSTS, config=CONFIG):
  acceptance = acceptance or luck(arrivals)
  return simulate(arrivals, acceptance, policy, config, costs)


def latency(simulation):
  return simulation.recorder.summarize(TARGET)['mean_e2e_latency']


def row_server(service_seconds, num_rows=1):
  """A server whose rows take a fixed time for a request of one token."""
  config = SchedulerConfig(
    buckets=StepBuckets(rows=(num_rows,), query_tokens=(num_rows,)),
    num_pages=num_rows,
    max_context=16,
  )
  return config, cases.linear_costs(fixed=service_seconds)


def test_waiting_time_of_a_single_server():
  """Item 43: M/D/1, by Pollaczek and Khinchine."""
  load = 0.8
  config, costs = row_server(0.5)
  ones = np.ones(4_000, np.int64)
  times = arrivals_lib.poisson(load / 0.5, 4_000, 0)
  arrivals = Arrivals(times=times, prompt_tokens=ones, output_tokens=ones)
  recorder = serve(arrivals, FixedLength(), costs=costs, config=config).recorder
  waiting = (recorder.last - recorder.arrivals).mean() - 0.5
  expected = load * 0.5 / (2 * (1 - load))
  assert waiting == pytest.approx(expected, rel=0.1)
  assert recorder.busy_seconds == pytest.approx(4_000 * 0.5)


class Counting(FixedLength):
  """Counts requests in the system, as the policy sees them."""

  def __init__(self):
    super().__init__()
    self.request_seconds = 0.0

  def observe(self, outcome):
    present = outcome.view.num_rows + outcome.view.num_waiting
    self.request_seconds += present * outcome.seconds


def test_littles_law():
  """Item 43: L = lambda W, of requests seen at the start of short steps."""
  config, costs = row_server(0.01, num_rows=8)
  arrivals = Arrivals(
    times=arrivals_lib.poisson(10.0, 600, 0),
    prompt_tokens=np.ones(600, np.int64),
    output_tokens=arrivals_lib.draw_lengths(60, 0.5, 600, 0, 'output'),
  )
  config = dataclasses.replace(config, num_pages=1000, max_context=4096)
  policy = Counting()
  recorder = serve(arrivals, policy, costs=costs, config=config).recorder
  span = recorder.last.max()
  seen = policy.request_seconds / span
  rate = len(arrivals) / span
  mean_latency = (recorder.last - recorder.arrivals).mean()
  assert seen > 5
  assert seen == pytest.approx(rate * mean_latency, rel=0.02)


@pytest.mark.parametrize(
  'policy', [FixedLength(5), Goodput(COSTS)], ids=['fixed', 'goodput']
)
def test_everything_is_served_once(policy):
  """Item 42, with little memory, so that rows are preempted."""
  config = dataclasses.replace(CONFIG, num_pages=160, max_context=2048)
  arrivals = dataclasses.replace(
    requests(60, 300, prompt=64, output=128),
    times=arrivals_lib.burst(60, 300, 0),
  )
  simulation = serve(arrivals, policy, config=config)
  recorder = simulation.recorder
  assert recorder.is_finished.all()
  np.testing.assert_array_equal(recorder.num_output, arrivals.output_tokens)
  assert (recorder.first > arrivals.times).all()
  assert (recorder.last >= recorder.first).all()
  assert simulation.num_preemptions > 0


def test_the_same_seed_gives_the_same_run():
  """Item 40."""
  arrivals = requests(20, 50)
  runs = [serve(arrivals, Goodput(COSTS)).recorder for _ in range(2)]
  np.testing.assert_array_equal(runs[0].last, runs[1].last)
  other = serve(requests(20, 50, seed=1), Goodput(COSTS)).recorder
  assert not np.array_equal(runs[0].last, other.last)


def test_policies_have_the_same_luck():
  """Item 40: a request alone takes the same steps, whoever is beside it."""
  arrivals = requests(20, 50)
  acceptance = luck(arrivals)
  buckets = StepBuckets.powers_of_two(64, 2**15, 7)
  config = dataclasses.replace(CONFIG, buckets=buckets)
  rounds = {}
  for name, rate in (('alone', 0.01), ('crowded', 1000.0)):
    times = arrivals_lib.poisson(rate, 50, 0)
    others = dataclasses.replace(arrivals, times=times)
    simulation = serve(others, FixedLength(3), acceptance, config=config)
    figures = simulation.recorder.summarize(TARGET)
    rounds[name] = sum(figures['chosen_lengths'])
    rounds[name, 'accepted'] = figures['acceptance_length']
  assert rounds['alone'] == rounds['crowded']
  assert rounds['alone', 'accepted'] == rounds['crowded', 'accepted']


def test_accepted_lengths_are_drawn():
  """Items 39 and 41: geometric, independent, cut where the draft ends."""
  output_tokens = np.full(2000, 9)
  acceptance = ChainAcceptance(output_tokens, np.full((2000, 7), 0.7), seed=0)
  view = cases.make_view(2000, cases.unpadded(2000, 1))
  lengths = np.full(2000, 5)
  accepted, _ = acceptance.verify(view, lengths)
  shares = np.bincount(accepted, minlength=6) / 2000
  expected = [*(0.3 * 0.7 ** np.arange(5)), 0.7**5]
  np.testing.assert_allclose(shares, expected, atol=0.03)
  later_view = cases.make_view(
    2000, cases.unpadded(2000, 1), num_output=view.num_output + 1
  )
  later, _ = acceptance.verify(later_view, lengths)
  # One token on, the same luck is left.
  is_long = (accepted > 0) & (accepted < 5)
  np.testing.assert_array_equal(later[is_long], accepted[is_long] - 1)


def test_confidence_and_outcome_are_one_draw():
  """Item 41."""
  acceptance = ChainAcceptance(
    np.full(5000, 9), np.full((5000, 7), 0.6), seed=0, sharpness=2.0
  )
  view = cases.make_view(5000, cases.unpadded(5000, 1))
  drafts = acceptance.draft(view, np.full(5000, 4))
  accepted, _ = acceptance.verify(view, drafts.lengths)
  # Also of a later token, where it is reached.
  reached = accepted >= 2
  later = drafts.confidences[2][reached]
  assert np.corrcoef(later, accepted[reached] > 2)[0, 1] > 0.5
  confidence = drafts.confidences[0]
  assert confidence.mean() == pytest.approx(0.6, abs=0.02)
  for low in (0.0, 0.25, 0.5, 0.75):
    is_near = (confidence >= low) & (confidence < low + 0.25)
    found = (accepted[is_near] > 0).mean()
    assert found == pytest.approx(confidence[is_near].mean(), abs=0.05)


def test_confidences_help():
  """Item 13 at work: tokens that are unlikely are not verified."""
  arrivals = requests(50, 500)
  plain = serve(arrivals, Goodput(COSTS), luck(arrivals))
  sharp = serve(arrivals, Goodput(COSTS), luck(arrivals, sharpness=0.5))
  assert latency(sharp) < latency(plain)


def test_a_closed_batch_has_the_golden_goodput():
  """Item 43: sixteen rows at a context of about 512."""
  count = 16
  arrivals = Arrivals(
    times=np.zeros(count),
    prompt_tokens=np.full(count, 448),
    output_tokens=np.full(count, 128),
  )
  buckets = cases.unpadded(16, max_query_tokens=8192)
  config = dataclasses.replace(CONFIG, buckets=buckets)
  golden = {2: 3739.8, 4: 4073.1, 7: 3813.5}
  for length, expected in golden.items():
    goodput = []
    for seed in range(8):
      policy = FixedLength(length)
      simulation = serve(
        arrivals, policy, luck(arrivals, seed=seed), cases.EAGLE_8B, config
      )
      recorder = simulation.recorder
      # Until the first row ends, all sixteen take part.
      figures = recorder.summarize(TARGET)
      step_seconds = cases.EAGLE_8B.predict(
        16, 16 * (length + 1), 16 * 512, length
      ).total
      goodput.append(16 * figures['acceptance_length'] / step_seconds)
    # Drafts are cut at the end of outputs, so a little is missing.
    assert np.mean(goodput) == pytest.approx(expected, rel=0.04)


RATES = (10.0, 60.0, 100.0, 160.0)


@pytest.fixture(scope='module')
def sweep():
  """Mean latencies of policies over rates, from idle to past saturation."""
  policies = {
    'none': FixedLength,
    'fixed_1': lambda: FixedLength(1),
    'fixed_3': lambda: FixedLength(3),
    'fixed_7': lambda: FixedLength(7),
    'goodput': lambda: Goodput(COSTS),
    'oracle': lambda: Goodput(COSTS, cases.Oracle(0.7)),
  }
  found = {}
  for rate in RATES:
    arrivals = requests(rate, 150)
    acceptance = luck(arrivals)
    for name, make in policies.items():
      found[name, rate] = latency(serve(arrivals, make(), acceptance))
  return found


def test_fixed_lengths_cross_no_speculation(sweep):
  """Item 45."""
  assert sweep['fixed_7', RATES[0]] < 0.7 * sweep['none', RATES[0]]
  assert sweep['fixed_7', RATES[-1]] > sweep['none', RATES[-1]]


@pytest.mark.parametrize('rate', RATES)
def test_goodput_is_as_good_as_the_best_fixed_length(sweep, rate):
  """Item 45."""
  names = ('none', 'fixed_1', 'fixed_3', 'fixed_7')
  fixed = [sweep[name, rate] for name in names]
  assert sweep['goodput', rate] < 1.05 * min(fixed)
  assert sweep['goodput', rate] < 1.03 * sweep['none', rate]
  assert sweep['goodput', rate] == pytest.approx(
    sweep['oracle', rate], rel=0.03
  )


def test_the_wrong_length_costs_much(sweep):
  """Item 45: most are far from goodput at some rate."""
  for name in ('none', 'fixed_1', 'fixed_7'):
    ratios = [sweep[name, rate] / sweep['goodput', rate] for rate in RATES]
    assert max(ratios) > 1.04
  assert sweep['none', RATES[0]] / sweep['goodput', RATES[0]] > 1.5


def test_a_better_drafter_is_noticed():
  """Items 21 and 45: acceptance jumps from .05 to .9 on the way."""
  arrivals = requests(20, 400)
  is_late = np.arange(400) >= 200
  acceptance = luck(arrivals, np.where(is_late, 0.9, 0.05))
  learned = serve(arrivals, Goodput(COSTS), acceptance).recorder
  off = serve(arrivals, FixedLength(), acceptance).recorder
  on = serve(arrivals, FixedLength(7), acceptance).recorder

  def mean(recorder, rows):
    return (recorder.last - recorder.arrivals)[rows].mean()

  early, late = slice(50, 200), slice(250, 400)
  assert mean(learned, early) < 1.03 * mean(off, early)
  assert mean(learned, late) < 1.05 * mean(on, late)
  assert mean(on, early) > 1.3 * mean(off, early)


def test_requests_that_differ():
  """Item 47: a choice for every request is better, and never worse."""
  arrivals = requests(100, 600)
  mixed = np.array([0.3, 0.95])[np.arange(600) % 2]
  ratios = []
  for acceptance in (mixed, 0.7):
    policy = Goodput(COSTS, ChainEstimator())
    own = serve(arrivals, policy, luck(arrivals, acceptance))
    policy = Goodput(COSTS, cases.PooledEstimator())
    pooled = serve(arrivals, policy, luck(arrivals, acceptance))
    ratios.append(latency(own) / latency(pooled))
  assert ratios[0] < 0.97
  assert ratios[1] == pytest.approx(1.0, abs=0.02)


class Comparing(Goodput):
  """Sums the tokens that were predicted, and those that came."""

  def __init__(self, costs):
    super().__init__(costs)
    self.predicted = self.realised = 0.0

  def observe(self, outcome):
    super().observe(outcome)
    if outcome.view.step > 200 and outcome.plan.is_probe is None:
      self.predicted += outcome.plan.expected_tokens
      self.realised += outcome.view.num_rows + outcome.num_accepted.sum()


def test_coverage_is_predicted():
  """Item 20."""
  arrivals = requests(20, 400)
  costs = cases.LOOKUP_70B.monotone()
  policy = Comparing(costs)
  serve(arrivals, policy, luck(arrivals, coverage=0.5), costs=costs)
  assert policy.predicted == pytest.approx(policy.realised, rel=0.02)


def test_tokens_are_predicted_where_confidence_decides():
  """Without those that are left out the prediction is a third too high."""
  arrivals = requests(40, 300)
  policy = Comparing(COSTS)
  serve(arrivals, policy, luck(arrivals, 0.6, sharpness=0.5))
  assert policy.predicted == pytest.approx(policy.realised, rel=0.05)


def test_trees():
  """The tree form, against plain decoding and against single sizes."""
  sizes = {'lengths': (0, 3, 7, 15), 'draft_steps': (0, 1, 2, 3)}
  buckets = dataclasses.replace(BUCKETS, **sizes)
  config = dataclasses.replace(CONFIG, buckets=buckets)
  for rate in (10, 100):
    arrivals = requests(rate, 150)
    acceptance = TreeAcceptance(
      arrivals.output_tokens, np.full(150, 0.6), 15, seed=0
    )
    policies = *map(FixedLength, (0, 3, 15)), Goodput(COSTS, TreeEstimator())
    *fixed, goodput = (
      latency(serve(arrivals, policy, acceptance, config=config))
      for policy in policies
    )
    assert goodput < 1.05 * min(fixed)
    assert goodput < fixed[0]


def test_figures():
  """Item 38."""
  arrivals = requests(30, 300)
  recorder = serve(arrivals, Goodput(COSTS)).recorder
  figures = recorder.summarize(TARGET)
  assert figures['num_requests'] == 300
  span = recorder.last.max() - arrivals.times[0]
  assert figures['throughput'] == pytest.approx(
    arrivals.output_tokens.sum() / span
  )
  survival = figures['acceptance_rate_per_position']
  np.testing.assert_allclose(survival[:4], 0.7 ** np.arange(1, 5), atol=0.06)
  lengths = np.array(figures['chosen_lengths'])
  mean = (lengths * np.arange(8)).sum() / lengths.sum()
  assert figures['mean_num_speculative_tokens'] == pytest.approx(mean)
  # All tokens but the first of each request come from rounds.
  tokens = lengths.sum() * figures['acceptance_length'] + 300
  assert tokens == pytest.approx(arrivals.output_tokens.sum())
  ratio = figures['predicted_goodput'] / figures['realised_goodput']
  assert ratio == pytest.approx(1.0, abs=0.05)
  assert figures['median_ttft'] <= figures['p90_ttft'] <= figures['p99_ttft']
  # An output holds several tokens.
  assert figures['mean_itl'] > 1.5 * figures['mean_tpot']
  assert 0 < figures['slo_attainment'] <= 1
