"""AdaServe by hand-computed values, and against the best of all choices."""

import dataclasses
import itertools

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax import policies
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies import adaserve, allocation
from swiftspec_jax.policies.adaserve import AdaServe
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.prediction.estimators import TreeEstimator
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.simulator import ChainAcceptance, TreeAcceptance, simulate
from swiftspec_jax.simulator import arrivals as arrivals_lib
from swiftspec_jax.simulator.load_metrics import LatencyTarget, LoadRecorder

PLENTY = 10**6


def columns(*rows):
  """Gains f64[K, B] of rows of different lengths."""
  gains = np.zeros((max(map(len, rows)), len(rows)))
  for i, row in enumerate(rows):
    gains[: len(row), i] = row
  return gains


# Path probabilities of figure 5 of the paper, best first.
PAPER = columns((0.7, 0.42, 0.294, 0.21, 0.2, 0.126), (0.5, 0.4, 0.35, 0.24))
# Three rows that promised 30, 50 and 150 ms a token and have emitted 9, 8 and 6
# in 300, 400 and 600 ms; a step takes 40 ms.
OWN = columns(
  (0.6, 0.36, 0.3, 0.18, 0.1),
  (0.8, 0.64, 0.5, 0.4),
  (0.9, 0.81, 0.73, 0.66, 0.59),
)
NEEDS = np.array([340 / 30 - 9, 440 / 50 - 8, 640 / 150 - 6])


@pytest.mark.parametrize('root', [0, 1])
def test_figure_of_the_paper(root):
  """Budget 8 with two roots; the needs are without the root, or with it."""
  needs = np.array([0.6, 0.8]) + 1 - root
  assert adaserve.select(PAPER, needs, 6, PLENTY).tolist() == [3, 3]


@pytest.mark.parametrize(
  ('needs', 'num_nodes', 'most', 'lengths', 'expected'),
  [
    (NEEDS, 7, PLENTY, [4, 1, 2], [2.44, 1.8, 2.71]),
    (NEEDS, 7, 3, [3, 1, 3], [2.26, 1.8, 3.44]),
    (np.full(3, -np.inf), 7, PLENTY, [1, 2, 4], [1.6, 2.44, 4.1]),
    (NEEDS, 2, PLENTY, [2, 0, 0], [1.96, 1, 1]),
  ],
)
def test_golden_choices(needs, num_nodes, most, lengths, expected):
  found = adaserve.select(OWN, needs, num_nodes, most)
  assert found.tolist() == lengths
  is_chosen = np.arange(len(OWN))[:, None] < found
  np.testing.assert_allclose(1 + (OWN * is_chosen).sum(axis=0), expected)


@pytest.mark.parametrize(
  ('num_rows', 'steps'), [(4, 8), (20, 8), (48, 3), (64, 2)]
)
def test_golden_depths(num_rows, steps):
  """A budget of 256 tokens, c1 = 4, up to 8 forwards."""
  assert adaserve.num_steps(256, num_rows + 4, 8) == steps


def test_choice_is_the_best_of_all():
  """Among all connected parts of random trees, if a choice keeps all."""
  generator = np.random.default_rng(0)
  num_feasible = 0
  for _ in range(100):
    trees = [random_tree(generator) for _ in range(2)]
    needs = generator.uniform(0.8, 2.2, 2)
    num_nodes = int(generator.integers(1, 7))
    best = max(
      (
        sum(found)
        for (n, *found) in pairs_of_parts(trees)
        if n <= num_nodes and (np.array(found) >= needs - 1e-12).all()
      ),
      default=None,
    )
    gains = columns(*(sorted(gains, reverse=True) for gains, _ in trees))
    lengths = adaserve.select(gains, needs, num_nodes, PLENTY)
    is_chosen = np.arange(len(gains))[:, None] < lengths
    expected = 1 + (gains * is_chosen).sum(axis=0)
    assert lengths.sum() <= num_nodes
    assert (expected >= needs - 1e-9).all() == (best is not None)
    if best is not None:
      num_feasible += 1
      # Equal in 16 bits is equal.
      assert expected.sum() == pytest.approx(best, abs=1e-4)
  assert 20 < num_feasible < 100


def random_tree(generator):
  """Gains of nodes, and the parents of the nodes."""
  parents = [-1]
  gains = [generator.uniform(0.2, 0.95)]
  for node in range(1, generator.integers(2, 6)):
    parent = int(generator.integers(-1, node))
    parents.append(parent)
    above = gains[parent] if parent >= 0 else 1.0
    gains.append(above * generator.uniform(0.2, 0.95))
  return gains, parents


def pairs_of_parts(trees):
  """Numbers of nodes of both trees, and the expected tokens of each."""
  parts = []
  for gains, parents in trees:
    nodes = range(len(gains))
    parts.append(
      [
        (len(part), 1 + sum(gains[node] for node in part))
        for size in range(len(gains) + 1)
        for part in itertools.combinations(nodes, size)
        if all(parents[node] in (-1, *part) for node in part)
      ]
    )
  for (n, x), (m, y) in itertools.product(*parts):
    yield n + m, x, y


class Known(cases.Oracle):
  """Takes the confidences of nodes for their gains."""

  def __init__(self):
    super().__init__(0.7)

  def gains_of(self, drafts):
    return drafts.node_confidences()


def own_view(**options):
  buckets = StepBuckets(
    rows=(3,), query_tokens=(3, 10), lengths=tuple(range(6))
  )
  return cases.make_view(
    3,
    buckets,
    num_output=[10, 9, 7],
    slo_tpots=[0.03, 0.05, 0.15],
    **{'decode_seconds': [0.3, 0.4, 0.6], **options},
  )


def verified(view):
  policy = AdaServe(cases.linear_costs(fixed=0.04), Known())
  asked, plan = policies.ask(policy, view)
  plan = dataclasses.replace(plan, lengths=np.full(3, 5))  # more than has room
  drafts = policies.Drafts(lengths=plan.lengths, node_confidences=OWN.copy)
  lengths = policy.plan_verify(asked, plan, drafts)
  assert asked.shortened(lengths).tolist() == lengths.tolist()
  return lengths.tolist()


def test_needs_come_from_promises_and_times(monkeypatch):
  assert verified(own_view()) == [4, 1, 2]
  with monkeypatch.context() as changed:
    changed.setattr(adaserve, '_MOST_FACTOR', 0.9)
    assert verified(own_view()) == [3, 1, 3]
  # The first row is 7 tokens late and cannot be helped.
  late = own_view(decode_seconds=[0.48, 0.4, 0.6])
  assert verified(late) == [1, 2, 4]
  nobody = dataclasses.replace(own_view(), slo_tpots=np.full(3, np.inf))
  assert verified(nobody) == allocation.allocate(OWN, 7).tolist()


def test_budget_is_what_the_target_takes_along(monkeypatch):
  """Tokens of 1 ms beside 10: half as long again at 9 tokens with 3 rows."""
  costs = cases.linear_costs(fixed=0.01, query_tokens=0.001)
  view = cases.make_view(3, cases.unpadded(3))
  assert AdaServe(costs)._num_nodes(view) == 6
  # 9 tokens of 3 rows: two forwards after the row's own token.
  assert AdaServe(costs).plan_draft(view).lengths.tolist() == [2, 2, 2]
  empty = cases.make_view(0, cases.unpadded(3))
  assert AdaServe(costs).plan_draft(empty).lengths.tolist() == []
  monkeypatch.setattr(adaserve, '_SLACK', 0)
  assert AdaServe(costs)._num_nodes(view) == 0
  assert not AdaServe(costs).plan_draft(view).lengths.any()


def requests(count, rate, shares, output=40, seed=0):
  return arrivals_lib.Arrivals(
    times=arrivals_lib.poisson(rate, count, seed),
    prompt_tokens=arrivals_lib.draw_lengths(64, 0.5, count, seed, 'prompt'),
    output_tokens=arrivals_lib.draw_lengths(output, 0.5, count, seed, 'output'),
    slo_tpots=arrivals_lib.draw_slos(shares, count, seed),
  )


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
  arrivals = requests(12, 50.0, {0.02: 1, 0.1: 1})
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
  recorder = LoadRecorder(np.zeros(3), 1, np.array([1.5, 0.5, 1.5]))
  recorder.first[:], recorder.last[:] = 1.0, (4.0, 4.0, 9.0)
  recorder.num_output[:] = 4, 4, 9
  recorder.note_finished(np.arange(3))
  figures = recorder.summarize(LatencyTarget(ttft=1.0, tpot=0.1))
  assert figures['tpot_attainment'] == pytest.approx(2 / 3)
  assert figures['slo_attainment'] == pytest.approx(2 / 3)
  assert figures['kept_throughput'] == pytest.approx(13 / 9)
  assert figures['tpot_attainment_1500ms'] == 1
  assert figures['tpot_attainment_500ms'] == 0


def test_the_urgent_get_more(monkeypatch):
  """Trees of up to 15 nodes for more rows than the budget serves."""
  buckets = StepBuckets(
    rows=(32,),
    query_tokens=(32, 64, 96, 128),
    lengths=(0, 3, 7, 15),
    draft_steps=(0, 1, 2, 3),
  )
  config = SchedulerConfig(buckets=buckets, num_pages=2**12, max_context=2**12)
  costs = cases.linear_costs(fixed=0.01, query_tokens=5e-5, steps=0.001)
  arrivals = requests(120, 60.0, {0.009: 1, 0.1: 3}, output=80)
  found = {}
  for name, most_factor in (('promises', 1.2), ('throughput', 0.0)):
    luck = TreeAcceptance(
      arrivals.output_tokens, np.full(len(arrivals), 0.6), 15, 0
    )
    monkeypatch.setattr(adaserve, '_MOST_FACTOR', most_factor)
    policy = AdaServe(costs, TreeEstimator())
    simulation = simulate(arrivals, luck, policy, config, costs)
    found[name] = simulation.recorder.summarize(LatencyTarget(ttft=9, tpot=9))
  urgent = {name: f['tpot_attainment_9ms'] for name, f in found.items()}
  assert urgent['promises'] > urgent['throughput'] + 0.2
  assert found['promises']['tpot_attainment_100ms'] == 1
  throughput = {name: f['throughput'] for name, f in found.items()}
  assert throughput['promises'] > 0.98 * throughput['throughput']


def test_prompts_are_not_starved():
  """They get half of the room, even if drafts could take all of it."""
  policy = AdaServe(cases.linear_costs(fixed=0.01))
  buckets = cases.unpadded(4, max_query_tokens=24)
  for num_prefill_tokens, num_nodes in ((0, 20), (5, 15), (100, 10)):
    view = cases.make_view(4, buckets, num_prefill_tokens=num_prefill_tokens)
    assert policy._num_nodes(view) == num_nodes
