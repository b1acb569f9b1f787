"""Adaptive sizes: what would have been accepted, and what pays."""

import pytest

from swiftspec_jax import types
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.pipelines import tree_sizes

ADAPTIVE = TreeConfig(num_nodes=16, num_draft_steps=8, is_adaptive=True)
TIMES = tree_sizes.StepTimes(
  target_seconds={4: 1.0, 8: 1.5, 16: 2.0}, draft_seconds=0.3
)


def report(path):
  return types.StepReport(
    token_ids=[0] * len(path),
    num_drafted=15,
    num_levels=8,
    num_accepted=len(path) - 1,
    outcome=0,
    num_forwards=0,
    path=path,
  )


def play(sizes, paths):
  for path in paths:
    num_nodes = sizes.next_num_nodes()
    sizes.note_verified(num_nodes)
    sizes.observe([report([node for node in path if node < num_nodes])])


def new_sizes(is_async, tree_config=ADAPTIVE):
  sizes = tree_sizes.TreeSizes(tree_config, is_async=is_async)
  sizes.times = TIMES
  return sizes


@pytest.mark.parametrize(
  ('num_nodes', 'buckets'),
  [(1, (1,)), (4, (4,)), (6, (4, 6)), (16, (4, 8, 16)), (20, (4, 8, 16, 20))],
)
def test_buckets_are_doublings(num_nodes, buckets):
  config = TreeConfig(num_nodes=num_nodes, is_adaptive=True)
  assert tree_sizes.node_buckets(config) == buckets
  config = TreeConfig(num_nodes=num_nodes)
  assert tree_sizes.node_buckets(config) == (num_nodes,)


@pytest.mark.parametrize('is_async', [False, True])
def test_wrong_drafts_make_the_tree_small(is_async):
  sizes = new_sizes(is_async)
  play(sizes, [[0]] * 10)
  assert sizes.num_nodes == 4
  assert sizes.num_draft_steps == (3 if is_async else 1)


def test_late_nodes_make_the_tree_large():
  """Nine tokens of 16 nodes in 2 s, two of 4 nodes in 1 s."""
  sizes = new_sizes(is_async=True)
  play(sizes, [[0, 1, 4, 6, 9, 11, 12, 13, 15]] * 10)
  assert sizes.num_nodes == 16
  assert sizes.num_draft_steps == 6  # 2.0 / 0.3, and 7 would take longer


def test_sizes_come_back():
  """Probes with the largest tree notice that drafts are good again."""
  sizes = new_sizes(is_async=False)
  play(sizes, [[0]] * 50)
  assert sizes.num_nodes == 4
  play(sizes, [[0, 1, 2, 5, 6, 9, 12, 13, 15]] * 200)
  assert sizes.num_nodes == 16
  assert sizes.num_draft_steps == 8


def test_fixed_sizes_stay():
  config = TreeConfig(num_nodes=16, num_draft_steps=8)
  sizes = tree_sizes.TreeSizes(config, is_async=False)
  play(sizes, [[0]] * 100)
  assert (sizes.num_nodes, sizes.num_draft_steps) == (16, 8)
