"""Trees of an engine against an oracle in plain Python."""

import itertools

import numpy as np
import pytest
from decoding_cases import request_of, sizes_of
from decoding_test import markov_table
from engine_cases import NEAR_TARGET, RandomLengths
from engine_test import alone
from serving_cases import linear_costs

from swiftspec_jax import errors, testing
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.estimators import TreeEstimator

SIZE = 7  # tokens of the tables
LENGTHS = tuple(range(9))
TABLE = markov_table(SIZE, seed=0, sharpness=1.5)
# Right often, but not always.
DRAFT_TABLE = 0.7 * TABLE + 0.3 * markov_table(SIZE, seed=1)
MODEL_ALONE = {'prompt_lookup': False}


def make_sizes():
  return sizes_of(
    num_pages=40,
    max_context=64,
    page_size=4,
    rows=(4,),
    query_tokens=(6, 40),
    lengths=LENGTHS,
    draft_steps=tuple(min(length, 3) for length in LENGTHS),
  )


def table_engine(policy, draft_table=DRAFT_TABLE, **options):
  return Engine(
    testing.table_model(TABLE),
    TreeDraft(model=testing.table_model(draft_table), **MODEL_ALONE, **options),
    sizes=make_sizes(),
    policy=policy,
  )


def best_nodes(
  table, root, num_steps, width, branching, num_nodes=0, min_leaf_mass=0.0
):
  """Paths of a tree with their probabilities, the best first."""
  nodes, expanded = {(): 1.0}, set()
  for step in range(num_steps):
    leaves = sorted(set(nodes) - expanded, key=lambda p: -nodes[p])
    leaves = leaves[: width if step else 1]
    mass = sum(nodes[path] for path in leaves)
    if len(nodes) > num_nodes and mass < min_leaf_mass:
      break
    for path in leaves:
      expanded.add(path)
      distribution = table[(root, *path)[-1]]
      for token in np.argsort(-distribution, kind='stable')[
        :branching
      ].tolist():
        nodes[(*path, token)] = nodes[path] * distribution[token]
  del nodes[()]
  return sorted(nodes.items(), key=lambda item: -item[1])


def greedy_ranks(paths, root):
  """Places of the nodes that the target accepts."""
  ranks, path = [], ()
  while True:
    path = (*path, int(TABLE[(root, *path)[-1]].argmax()))
    if path not in paths:
      return ranks
    ranks.append(paths.index(path))


@pytest.mark.parametrize(
  ('width', 'branching', 'min_leaf_mass'), [(8, 2, 0.0), (2, 3, 0.6)]
)
def test_nodes_are_those_of_the_oracle(width, branching, min_leaf_mass):
  policy = RandomLengths(0)
  engine = table_engine(
    policy, width=width, branching=branching, min_leaf_mass=min_leaf_mass
  )
  steps_of = make_sizes().scheduler.buckets.steps_of
  handle = engine.submit(request_of((1, 2), max_new_tokens=50))
  known, num_checked, num_accepted = [1, 2], 0, 0
  while engine.step() is not None:
    outcome, root = policy.outcomes[-1], known[-1]
    known = [1, 2, *sum((update.token_ids for update in handle._updates), ())]
    if not outcome.drafts.lengths.any():
      assert not outcome.lengths.any()
      continue
    drafted, verified = int(outcome.drafts.lengths[0]), int(outcome.lengths[0])
    nodes = best_nodes(
      DRAFT_TABLE,
      root,
      steps_of(drafted),
      width,
      branching,
      drafted,
      min_leaf_mass,
    )
    paths = [path for path, _ in nodes]
    confidences = outcome.drafts.node_confidences()
    assert confidences.shape == (LENGTHS[-1], 1)
    np.testing.assert_allclose(
      confidences[:drafted, 0], [p for _, p in nodes[:drafted]], rtol=1e-4
    )
    assert (confidences[drafted:] == 0).all()
    expected = greedy_ranks(paths[:verified], root)
    ranks = outcome.accepted_ranks[:, 0]
    assert ranks[ranks >= 0].tolist() == expected
    assert outcome.num_accepted[0] == len(expected)
    num_checked += 1
    num_accepted += len(expected)
  assert num_checked > 10
  assert num_accepted > 5
  for before, after in itertools.pairwise(known[1:]):
    assert after == TABLE[before].argmax()


def test_stats_count_levels():
  engine = table_engine(FixedLength(8), draft_table=TABLE, width=8, branching=2)
  stats = engine.submit(request_of((1,), max_new_tokens=40)).result().stats
  # Three forwards make trees of three levels.
  drafted = stats.drafted_per_position
  assert drafted[0] >= drafted[1] >= drafted[2] > 0 == sum(drafted[3:])
  assert stats.num_accepted == sum(stats.accepted_per_position) > 20
  assert stats.num_drafted > sum(drafted)


@pytest.mark.parametrize('seconds_per_token', [0.0, 0.0003])
def test_goodput_takes_the_nodes_that_pay(seconds_per_token):
  """A step of 10 ms: if tokens cost nothing, all nodes are verified."""
  costs = linear_costs(fixed=0.01, query_tokens=seconds_per_token)
  engine = table_engine(Goodput(costs, TreeEstimator()), width=8, branching=2)
  requests = [request_of((i,), max_new_tokens=40, seed=i) for i in range(4)]
  handles = [engine.submit(request) for request in requests]
  lengths = []
  while (record := engine.step()) is not None:
    lengths.append(record.step.lengths.mean())
  expected = alone(requests, testing.table_model(TABLE))
  for handle, plain in zip(handles, expected, strict=True):
    assert handle.result().token_ids == plain.token_ids
  mean = np.mean(lengths[1:-1])
  assert mean > 5 if seconds_per_token == 0 else 0 < mean < 4


def test_trees_hold_what_the_text_repeats():
  """After a draft that knows nothing."""
  draft = TreeDraft(
    model=testing.table_model(np.full((SIZE, SIZE), 1 / SIZE)),
    width=8,
    branching=2,
  )
  circle = testing.table_model(np.roll(np.eye(SIZE), 1, axis=1))
  engine = Engine(circle, draft, sizes=make_sizes(), policy=FixedLength(8))
  request = request_of((*range(SIZE), 0, 1), max_new_tokens=40)
  stats = engine.submit(request).result().stats
  # Chains go on periodically; trees of the draft alone have three levels.
  assert stats.num_rounds < 10


def test_bad_sizes_are_refused():
  model = testing.table_model(TABLE)
  with pytest.raises(errors.UserError, match='branching must be 1 to 7'):
    TreeDraft(model=model, branching=8)
  with pytest.raises(errors.UserError, match='less than 4 nodes after 3'):
    table_engine(FixedLength(1), width=1, branching=1)
  with pytest.raises(errors.UserError, match='vocabular'):
    Engine(model, TreeDraft(model=NEAR_TARGET), sizes=make_sizes())
