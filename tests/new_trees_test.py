"""Rows without a tree beside rows that have one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_cases import CONFIG, TREE

from swiftspec_jax import testing
from swiftspec_jax.drafters.trees import tree_draft
from swiftspec_jax.tree import types

NUM_ROWS = 3
MODEL = dataclasses.replace(CONFIG, num_layers=1)


@pytest.fixture(scope='module')
def model():
  return testing.random_model(MODEL, devices=jax.devices()[:1])


def grow(model, state, rows, num_steps):
  """The state whose rows are busy has grown."""
  is_busy = np.isin(np.arange(NUM_ROWS), rows)
  state, num_forwards = tree_draft.grow(
    model.params,
    state.replace(is_busy=jax.device_put(is_busy)),
    jnp.int32(num_steps),
    config=model.config,
    tree_config=TREE,
  )
  assert num_forwards == num_steps
  return state


def roots(model):
  state = tree_draft.init(
    model.config,
    TREE,
    model.dtype,
    batch_size=NUM_ROWS,
    capacity=64,
    mesh=model.mesh,
  )
  tokens = jnp.arange(1, NUM_ROWS + 1)
  return state.replace(tree=tree_draft.new_tree(TREE, tokens))


def test_new_trees_take_no_forward_from_others(model):
  """Each forward expands four leaves, and the root is the first one alone."""
  state = grow(model, roots(model), [0], 1)
  state = grow(model, state, [0, 1], 2)
  assert state.tree.num_expanded.tolist() == [1 + 4 + 4, 1 + 4, 0]
  alone = grow(model, roots(model), [1], 2)
  second, only = (jax.tree.map(lambda x: x[1], t.tree) for t in (state, alone))
  jax.tree.map(np.testing.assert_array_equal, second, only)


def test_the_token_before_a_root_takes_a_forward(model):
  state = grow(model, roots(model), [0], 1)
  state = state.replace(before=state.before.at[2].set(9))
  state = grow(model, state, [0, 1, 2], 3)
  assert state.tree.num_expanded.tolist() == [1 + 4 + 4, 1 + 4, 1 + 4 + 4]
  assert state.cache.kv_lengths.tolist() == [0, 0, 1]
  assert (state.before == types.PLACEHOLDER_TOKEN_ID).all()


@pytest.mark.parametrize(
  ('wait_from', 'sizes'), [(1, [8, 8, 8]), (2, [8, 8, 8]), (3, [8, 1, 1])]
)
def test_some_rows_are_waited_for_and_fewer_are_not(model, wait_from, sizes):
  state = grow(model, roots(model), [0], 3)
  nothing_new = types.VerifiedTokens(
    token_ids=jnp.zeros((NUM_ROWS, TREE.num_nodes), jnp.int32),
    num_tokens=jnp.zeros(NUM_ROWS, jnp.int32),
  )
  _, proposal = tree_draft.advance(
    model.params,
    state.replace(is_busy=jnp.ones(NUM_ROWS, bool)),
    nothing_new.pack(),
    *map(jnp.int32, (1, wait_from)),
    config=model.config,
    tree_config=TREE,
    num_nodes=TREE.num_nodes,
  )
  proposal = types.TreeProposal.unpack(proposal)
  assert proposal.size.tolist() == sizes
  has_waited = wait_from < 3
  assert proposal.num_forwards.tolist() == [2 * has_waited] * NUM_ROWS
