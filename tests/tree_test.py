"""The token tree by examples; docs/how_it_works/token_tree.md has the same."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tree_oracle

from swiftspec_jax import errors
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.models.cache import dense

# Children of t1, t2, ... and their log-probabilities, as in token_tree.md.
EXAMPLE = {
  1: {2: -0.75, 3: -1.0},
  2: {4: -2.5},
  3: {5: -1.0, 6: -1.25},
  5: {7: -0.5},
  6: {9: -0.25},
  7: {8: -0.5},
  8: {12: -1.0},
  9: {10: -0.25},
  10: {11: -0.5},
  11: {13: -1.0},
  13: {14: -0.25},
  14: {15: -0.25},
  16: {17: -0.5, 18: -1.25},
  17: {19: -2.5},
  18: {20: -0.5, 21: -1.5},
}
CHAIN_EXAMPLE = {1: {2: -0.75, 3: -1.0}, 3: {5: -0.125, 6: -1.25}, 5: {7: -0.5}}
CACHE_EXAMPLE = {
  10: {11: -0.5, 12: -1.0},
  11: {13: -1.0, 14: -1.25},
  12: {15: -1.0, 16: -1.5},
  15: {17: -1.0, 18: -1.25},
}


def example_draft(example):
  """A draft of two children at most; the carry counts its forwards."""
  token_ids = np.zeros((32, 2), np.int32)
  log_probs = np.full((32, 2), -np.inf, np.float32)
  for parent, children in example.items():
    for i, (token_id, log_prob) in enumerate(children.items()):
      token_ids[parent, i], log_probs[parent, i] = token_id, log_prob

  def draft_fn(num_forwards, leaves):
    return (
      jnp.asarray(token_ids)[leaves.token_ids],
      jnp.asarray(log_probs)[leaves.token_ids],
      num_forwards + 1,
    )

  return draft_fn


DRAFT, CHAIN_DRAFT, CACHE_DRAFT = map(
  example_draft, (EXAMPLE, CHAIN_EXAMPLE, CACHE_EXAMPLE)
)
grow = tree_oracle.compiled(
  tree_lib.grow, static_argnames=('draft_fn', 'num_nodes', 'width')
)
select = tree_oracle.compiled(tree_lib.select, static_argnames='num_nodes')
best_candidates = tree_oracle.compiled(
  tree_lib.best_candidates, static_argnums=1
)
add_chain = tree_oracle.compiled(tree_lib.add_chain)
reroot_program = tree_oracle.compiled(tree_lib.reroot)


def new_tree(token_id, capacity=24, num_cache_rows=16, chain_length=1):
  return tree_oracle.new_tree(
    np.array([token_id], np.int32),
    capacity=capacity,
    num_cache_rows=num_cache_rows,
    chain_length=chain_length,
  )


status_of = tree_oracle.compiled(lambda tree: tree.status)


def tokens(tree, *status):
  """Token ids of the nodes, or of those with a status."""
  status = status or (tree_lib.CANDIDATE, tree_lib.EXPANDED)
  is_wanted = np.isin(status_of(tree), status)
  return tree.nodes.token_ids[is_wanted].tolist()


def summary(moved):
  """The outcome, the rows that join the prefix, those that stay after it."""
  committed, surviving = np.split(moved.path[0], [moved.num_committed[0]])
  surviving = np.trim_zeros(surviving, 'b')
  return int(moved.outcome[0]), committed.tolist(), surviving.tolist()


def reroot(tree, *token_ids):
  return reroot_program(
    tree, np.array([token_ids], np.int32), np.array([len(token_ids)], np.int32)
  )


def test_two_rounds_with_hit_and_miss():
  """Figure 2 of the paper: w=2, d=3, bs=4."""
  fill = functools.partial(
    grow, draft_fn=DRAFT, num_steps=0, num_nodes=4, width=2
  )
  extend = functools.partial(grow, draft_fn=DRAFT, num_steps=3, width=2)
  tree, num_forwards = fill(new_tree(1), 0)
  assert tokens(tree) == [1, 2, 3, 4, 5, 6]
  sent = select(tree, 4)
  assert sent.token_ids.tolist() == [[1, 2, 3, 5]]
  assert sent.parents.tolist() == [[-1, 0, 0, 2]]
  assert sent.depths.tolist() == [[0, 1, 1, 2]]

  tree, num_forwards = extend(tree, num_forwards)
  assert tokens(tree) == [1, 2, 3, 4, 5, 6, 7, 9, 8, 10, 11, 12]
  assert tokens(tree, tree_lib.CANDIDATE) == [4, 11, 12]
  tree, moved = reroot(tree, 3, 6)
  assert summary(moved) == (tree_lib.HIT, [0, 2], [4, 6, 7])
  assert tree_oracle.listing(tree, 0) == [
    (6, -1, 0, 0.0, 0),
    (9, 0, 1, -0.25, 1),
    (10, 1, 2, -0.5, 2),
    (11, 2, 3, -1.0, -1),
  ]
  assert num_forwards == 5
  tree, num_forwards = fill(tree, num_forwards)
  assert num_forwards == 5  # a hit with enough nodes costs no forward
  assert select(tree, 4).token_ids.tolist() == [[6, 9, 10, 11]]

  tree, num_forwards = extend(tree, num_forwards)
  assert tokens(tree) == [6, 9, 10, 11, 13, 14, 15]
  tree, moved = reroot(tree, 9, 16)
  assert summary(moved) == (tree_lib.MISS, [0, 1], [])
  assert tree_oracle.listing(tree, 0) == [(16, -1, 0, 0.0, -1)]
  tree, num_forwards = fill(tree, num_forwards)
  assert num_forwards == 10
  assert tokens(tree) == [16, 17, 18, 19, 20, 21]
  assert select(tree, 4).token_ids.tolist() == [[16, 17, 18, 20]]


def test_scored_candidate_as_next_token_is_a_late_hit():
  tree, _ = grow(new_tree(1), 0, DRAFT, num_steps=2, width=2)
  tree, moved = reroot(tree, 2, 4)
  assert summary(moved) == (tree_lib.LATE_HIT, [0, 1], [])
  assert tree_oracle.listing(tree, 0) == [(4, -1, 0, 0.0, -1)]


def test_cache_keeps_path_and_subtree():
  """Figure 4 of the paper; the root's row is the first of the tree here."""
  tree, _ = grow(new_tree(10), 0, CACHE_DRAFT, num_steps=5, width=2)
  slots = tree.nodes.cache_slots[0, :9]
  in_rows = tree.nodes.token_ids[0, np.argsort(slots)]
  assert in_rows.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18]
  rows = np.zeros((1, 1, 32, 1), np.int32)
  rows[0, 0, :12, 0] = [1, 3, 7, *in_rows]
  cache = dense.KVCache(
    keys=[rows], values=[rows], kv_lengths=np.array([3], np.int32), capacity=32
  )
  tree, moved = reroot(tree, 12, 15)
  assert summary(moved) == (tree_lib.HIT, [0, 2], [5, 7, 8])
  cache = tree_oracle.compiled(dense.commit)(
    cache, moved.path, moved.num_committed
  )
  rows = cache.keys[0][0, 0, :8, 0]
  assert rows.tolist() == [1, 3, 7, 10, 12, 15, 17, 18]
  assert cache.kv_lengths.tolist() == [5]
  assert tokens(tree, tree_lib.EXPANDED) == [15, 17, 18]


def test_leaves_see_ancestors_and_themselves():
  tree, _ = grow(new_tree(1), 0, DRAFT, num_steps=3, width=2)
  # Rows: t1, t2, t3, t5, t6; next come t7 and t9, of equal weights.
  leaves = best_candidates(tree, 4)
  assert leaves.token_ids.tolist() == [[7, 9, 4, -1]]
  assert leaves.depths.tolist() == [[3, 3, 2, 0]]
  assert leaves.cache_slots.tolist() == [[5, 6, 7, 8]]
  seen = [np.flatnonzero(row).tolist() for row in leaves.attention_mask[0]]
  assert seen == [[0, 2, 3, 5], [0, 2, 4, 6], [0, 1, 7], []]


def suggest(tree):
  """A text says that t3, t5 and t7 follow."""
  token_ids = np.array([[3, 5, 7]], np.int32)
  return add_chain(tree, token_ids, np.full((1, 3), -0.25, np.float32))


def assert_weights(tree, wanted):
  """Gains are rounded down."""
  size = int(tree.size[0])
  found = tree.nodes.log_probs[0, :size].tolist()
  assert tree.nodes.token_ids[0, :size].tolist() == list(wanted)
  assert found == pytest.approx([*wanted.values()], abs=4 * tree_oracle.QUANTUM)


def test_a_chain_of_a_text_starts_with_what_is_there():
  tree, _ = grow(
    new_tree(1, chain_length=4), 0, CHAIN_DRAFT, num_steps=1, width=4
  )
  tree = suggest(tree)
  assert_weights(tree, {1: 0, 2: -0.75, 3: -0.25, 5: -0.5, 7: -0.75})
  assert tree.nodes.parents[0, :5].tolist() == [-1, 0, 0, 2, 3]
  assert tree.nodes.depths[0, :5].tolist() == [0, 1, 1, 2, 3]
  assert suggest(tree).size == tree.size
  # Then the draft finds t5 better by 0.125, and t7 moves with it.
  tree, _ = grow(tree, 0, CHAIN_DRAFT, num_steps=1, width=4)
  weights = {1: 0, 2: -0.75, 3: -0.25, 5: -0.375, 7: -0.625, 6: -1.5}
  assert_weights(tree, weights)
  found = tree.nodes.log_probs[0]
  assert found[3] > found[4] > -0.75


def test_ancestor_mask_follows_parents():
  parents = np.array([[-1, 0, 1, 2, 3, 1, 5, -1], [-1] + [0] * 7], np.int32)
  expected = np.zeros((2, 8, 8), bool)
  for row, node in np.ndindex(2, 8):
    above = node
    while above >= 0:
      expected[row, node, above] = True
      above = parents[row, above]
  mask = tree_oracle.compiled(tree_lib.ancestor_mask)(parents)
  np.testing.assert_array_equal(mask, expected)


def test_sizes_that_make_no_sense_are_refused():
  with pytest.raises(errors.UserError, match='from 1 to the capacity of 4'):
    new_tree(1, capacity=4, num_cache_rows=5)
