"""Plans of elastic sequence parallelism, and serving with them."""

import itertools
import math
import sys

import numpy as np
import pytest

from swiftspec_jax import errors
from swiftspec_jax.planning import elastic
from swiftspec_jax.serving import arrivals
from swiftspec_jax.simulator import elastic as simulator

# Seconds 0.2 p + (0.1 * sum + 0.05 * sum of squares) / p.
COSTS = elastic.PrefillCosts(
  coefficients={p: (0.2 * p, 0.1 / p, 0.05 / p) for p in range(1, 9)}
)


def groups_of(lengths, free_tokens):
  """Groups as lengths and rooms, and the sum of latencies."""
  plan = elastic.plan_prefills(lengths, free_tokens, COSTS)
  groups = [
    ([lengths[i] for i in x.requests], [free_tokens[i] for i in x.instances])
    for x in plan
  ]
  return groups, sum(len(x.requests) * x.seconds for x in plan)


def test_golden_plans():
  groups, total = groups_of([8, 4, 1], [4, 6, 10])
  assert groups == [([8], [4, 6]), ([4, 1], [10])]
  assert total == pytest.approx(2.4 + 2 * 1.55)
  groups, total = groups_of([1, 4, 8, 1], [10, 4, 6])
  assert groups == [([8], [4, 6]), ([4, 1, 1], [10])]
  assert total == pytest.approx(7.5)
  assert 3 * COSTS.seconds([8, 4, 1], 3) == pytest.approx(7.15)


def test_what_does_not_fit_waits():
  assert groups_of([5, 30], [4, 6])[0] == [([5], [4, 6])]
  assert groups_of([30], [4, 6])[0] == []
  assert groups_of([1], [0, 0])[0] == []
  # One of two instances stays free: a short prompt gains nothing by it.
  assert groups_of([1], [4, 6])[0] == [([1], [4])]


def exhaustive(lengths, free_tokens):
  """The least sum over all plans of runs of sorted prompts and instances."""
  lengths, rooms = sorted(lengths, reverse=True), sorted(free_tokens)
  found = math.inf
  for num_groups in range(1, len(lengths) + 1):
    for inner in itertools.combinations(range(1, len(lengths)), num_groups - 1):
      cuts = [0, *inner, len(lengths)]
      # Where runs of instances begin and end, with gaps.
      for edges in itertools.combinations_with_replacement(
        range(len(rooms) + 1), 2 * num_groups
      ):
        total = 0.0
        for group, (low, high) in enumerate(
          zip(edges[::2], edges[1::2], strict=True)
        ):
          batch = lengths[cuts[group] : cuts[group + 1]]
          if low == high or sum(batch) > sum(rooms[low:high]):
            total = math.inf
            break
          total += len(batch) * COSTS.seconds(batch, high - low)
        found = min(found, total)
  return found


def test_plans_are_the_best_of_their_form():
  generator = np.random.default_rng(0)
  for _ in range(40):
    lengths = generator.integers(1, 20, generator.integers(1, 5)).tolist()
    rooms = generator.integers(0, 25, generator.integers(1, 5)).tolist()
    groups, total = groups_of(lengths, rooms)
    served = sum(len(batch) for batch, _ in groups)
    if served:
      assert total == pytest.approx(exhaustive(lengths[:served], rooms))
    if served < len(lengths):
      assert math.isinf(exhaustive(lengths[: served + 1], rooms))


def test_many_requests_are_planned_by_few_calls():
  """None for each pair of requests and each pair of instances: 73,728 here."""
  lengths = np.random.default_rng(0).integers(1, 100, 64).tolist()
  calls = []
  sys.setprofile(lambda frame, event, _: calls.append(event.endswith('call')))
  try:
    plan = elastic.plan_prefills(lengths, [2000] * 8, COSTS)
  finally:
    sys.setprofile(None)
  assert sum(calls) < 10_000
  assert sum(len(group.requests) for group in plan) == 64


def test_golden_placement():
  kept = elastic.place(600_000, [100_000, 200_000, 400_000])
  assert kept.tolist() == [0, 200_000, 400_000]
  assert elastic.place(700_001, [100_000, 200_000, 400_000]) is None
  # As even as room allows, on the two that are enough.
  assert elastic.place(7, [2, 5, 6]).tolist() == [0, 3, 4]
  assert elastic.place(0, [2, 5]).tolist() == [0, 0]


def test_golden_numbers():
  """One more instance takes 0.2 s more, and a share of the work."""
  # The work of 8 tokens is 0.8 + 3.2 s: 4.2, 2.4, 2.1 s.
  assert COSTS.fastest([8], numbers=(1, 2, 8)) == 8
  # Of 2 tokens after 6: 0.2 + 0.05 * (64 - 36) = 1.6, so 1.8, 1.2, 1.8 s.
  assert COSTS.seconds([2], 2, [6]) == pytest.approx(1.2)
  assert COSTS.fastest([2], [6], numbers=(1, 2, 8)) == 2
  # Of one token 0.15: 0.35 and 0.475 s.
  assert COSTS.fastest([1]) == 1
  free = elastic.PrefillCosts(coefficients={2: (1, 0, 0), 4: (1, 0, 0)})
  assert free.fastest([5, 7]) == 2
  # A prompt in two parts takes the fixed time twice.
  parts = COSTS.seconds([6], 2) + COSTS.seconds([2], 2, 6)
  assert parts == pytest.approx(COSTS.seconds([8], 2) + 0.4)


def test_exact_costs_are_found_again():
  batches = [[1], [5, 2], [9], [3, 3, 3]]
  measured = {
    p: [
      (x, start, COSTS.seconds(x, p, start))
      for x in batches
      for start in (0, 4)
    ]
    for p in (1, 2)
  }
  found = elastic.PrefillCosts.fit(measured)
  for p in (1, 2):
    np.testing.assert_allclose(found.coefficients[p], COSTS.coefficients[p])


INSTANCE = simulator.ElasticCosts(
  prefill=COSTS,
  decode=1.0,
  exchange=0.25,
  row=0.5,
  kv_token=0.01,
  move_token=0.001,
  room=40,
  batch_tokens=16,
)


def requests_of(times, prompts, outputs):
  return arrivals.Arrivals(
    times=np.array(times, float),
    prompt_tokens=np.array(prompts),
    output_tokens=np.array(outputs),
  )


def test_a_request_alone():
  """The best prefill of 8 tokens is on two; one instance keeps the tokens."""
  requests = requests_of([0.5], [8], [3])
  step = 1.0 + 0.5 + 0.01 * 11
  widths = {p: COSTS.seconds([8], p) for p in (1, 2, 3)}
  alone = simulator.simulate_elastic(requests, INSTANCE, 3)
  np.testing.assert_allclose(alone, min(widths.values()) + 2 * step)
  three = np.array([11 / 3] * 3)
  static = simulator.simulate_group(requests, INSTANCE, 3)
  assert static[0] == pytest.approx(
    widths[3] + 2 * INSTANCE.decode_seconds(1, three, 3), abs=0.2
  )
  # All three read, and one of them decodes after 9 and 10 tokens.
  kept = simulator.simulate_group(requests, INSTANCE, 3, num_keeping=1)
  assert kept[0] == pytest.approx(widths[3] + 2 * (1.0 + 0.5) + 0.09 + 0.1)


class Watched(simulator.Cluster):
  """Looks at the room of every instance after each event."""

  def advance(self):
    is_on = super().advance()
    assert (self.kept >= 0).all()
    assert (self.kept <= INSTANCE.room).all()
    return is_on


@pytest.mark.parametrize('num_instances', [1, 3])
@pytest.mark.parametrize(
  'policy',
  [
    simulator.Elastic(),
    simulator.Elastic(scales_up=False),
    simulator.Elastic(keeps_fewest=False),
  ],
)
def test_everybody_ends_and_nobody_has_more_than_the_room(
  policy, num_instances
):
  generator = np.random.default_rng(0)
  count = 60
  requests = requests_of(
    np.cumsum(generator.exponential(2.0, count)),
    generator.integers(1, 30, count),
    generator.integers(1, 10, count),
  )
  cluster = Watched(requests, INSTANCE, num_instances, policy)
  while cluster.advance():
    pass
  assert (cluster.ends > requests.times).all()
  assert not cluster.kept.any()
  for chunk_tokens in (None, 8):
    latency = simulator.simulate_group(
      requests, INSTANCE, num_instances, chunk_tokens
    )
    assert (latency > 0).all()


def test_a_request_longer_than_all_memory_is_refused():
  requests = requests_of([0], [81], [1])
  for simulate in (simulator.simulate_elastic, simulator.simulate_group):
    with pytest.raises(errors.UserError, match='82 tokens is more than the 80'):
      simulate(requests, INSTANCE, 2)


def test_instances_without_costs_are_refused():
  requests = requests_of([0], [8], [1])
  for simulate in (simulator.simulate_elastic, simulator.simulate_group):
    with pytest.raises(errors.UserError, match='no coefficients for 9 inst'):
      simulate(requests, INSTANCE, 9)
