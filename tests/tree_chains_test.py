"""Chains of a text in the tree, by hand; `tree_game_test` plays with them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tree_oracle

from swiftspec_jax import tree as tree_lib

add_chains = tree_oracle.compiled(tree_lib.add_chains)
best_candidates = tree_oracle.compiled(
  tree_lib.best_candidates, static_argnums=(1, 2)
)


@functools.partial(tree_oracle.compiled, static_argnums=1)
def expand(tree, width):
  return tree_lib.expand_best(tree, 0, example_draft, width)[0]


# Children of t1, as in docs/how_it_works/token_tree.md.
EXAMPLE = {1: {2: -0.75, 3: -1.0}, 3: {5: -0.125, 6: -1.25}, 5: {7: -0.5}}


def example_draft(carry, leaves):
  token_ids = np.zeros((8, 2), np.int32)
  log_probs = np.full((8, 2), -np.inf, np.float32)
  for parent, children in EXAMPLE.items():
    for i, (token_id, log_prob) in enumerate(children.items()):
      token_ids[parent, i], log_probs[parent, i] = token_id, log_prob
  return (
    jnp.asarray(token_ids)[leaves.token_ids],
    jnp.asarray(log_probs)[leaves.token_ids],
    carry,
  )


def chains_of(token_ids, log_probs):
  return np.array([token_ids], np.int32), np.array([log_probs], np.float32)


def example_tree():
  tree = tree_oracle.new_tree(
    np.array([1], np.int32), capacity=24, num_cache_rows=8, chain_length=4
  )
  tree = expand(tree, 4)
  return add_chains(tree, *chains_of([[3, 5, 7]], [[-0.25] * 3]))


def weights(tree):
  size = int(tree.size[0])
  tokens = tree.nodes.token_ids[0, :size].tolist()
  found = tree.nodes.log_probs[0, :size].tolist()
  return dict(zip(tokens, found, strict=True))


def close(**expected):
  """Token t<n> and its weight; gains are rounded down."""
  return {
    int(name[1:]): pytest.approx(weight, abs=4 * tree_oracle.QUANTUM)
    for name, weight in expected.items()
  }


def test_a_chain_starts_with_what_is_there():
  tree = example_tree()
  assert weights(tree) == close(t1=0, t2=-0.75, t3=-0.25, t5=-0.5, t7=-0.75)
  assert tree.nodes.parents[0, :5].tolist() == [-1, 0, 0, 2, 3]
  assert tree.nodes.depths[0, :5].tolist() == [0, 1, 1, 2, 3]
  again = add_chains(tree, *chains_of([[3, 5, 7]], [[-0.25] * 3]))
  assert again.size == tree.size


def test_a_chain_is_expanded_in_one_forward():
  tree = example_tree()
  leaves = best_candidates(tree, 4)
  assert leaves.token_ids.tolist() == [[3, 5, 7, 2]] or (
    leaves.token_ids.tolist() == [[3, 5, 2, 7]]
  )
  seen = {
    token: np.flatnonzero(row).tolist()
    for token, row in zip(
      leaves.token_ids[0].tolist(), leaves.attention_mask[0], strict=True
    )
  }
  slot = dict(
    zip(
      leaves.token_ids[0].tolist(), leaves.cache_slots[0].tolist(), strict=True
    )
  )
  assert seen[7] == sorted([0, slot[3], slot[5], slot[7]])
  assert seen[2] == [0, slot[2]]


def test_children_that_a_chain_brought_are_merged():
  tree = expand(example_tree(), 4)
  # t5 is better by 0.125 for the model, and t7 moves with it.
  assert weights(tree) == close(
    t1=0, t2=-0.75, t3=-0.25, t5=-0.375, t7=-0.625, t6=-1.5
  )
  found = tree.nodes.log_probs[0]
  assert found[3] > found[4] > -0.75
