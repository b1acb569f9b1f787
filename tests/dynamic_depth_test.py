"""When trees stop growing: by the probability of the next leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_oracle
from decoding_cases import assert_same, run
from tree_cases import DEVICES, TREE, pair, requests_of
from tree_test import DRAFT, add_chain, best_candidates, grow

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax import tree as tree_lib

# Probabilities of the four leaves after each forward; of the paths of steps
# 5, 7 and 9 the sums are .50, .26 and .14.
BEAMS = np.array(
  [
    [0.50, 0.30, 0.10, 0.08],
    [0.45, 0.25, 0.10, 0.07],
    [0.40, 0.20, 0.08, 0.06],
    [0.35, 0.15, 0.06, 0.04],
    [0.30, 0.12, 0.05, 0.03],
    [0.22, 0.08, 0.04, 0.02],
    [0.16, 0.05, 0.03, 0.02],
    [0.12, 0.05, 0.03, 0.02],
    [0.08, 0.03, 0.02, 0.01],
    [0.06, 0.03, 0.02, 0.01],
    [0.05, 0.02, 0.01, 0.01],
  ],
  np.float32,
)
leaf_mass = tree_oracle.compiled(tree_lib.leaf_mass, static_argnums=1)


def beam_draft(num_forwards, leaves):
  """Four children of the root; each of the others has one."""
  beams = jnp.asarray(BEAMS)
  of_root = jnp.broadcast_to(beams[:1], (4, 4))
  ratio = beams[num_forwards] / beams[jnp.maximum(num_forwards - 1, 0)]
  of_leaf = jnp.where(jnp.arange(4) == 0, ratio[:, None], 0.0)
  probs = jnp.where(num_forwards == 0, of_root, of_leaf)[None]
  token_ids = jnp.broadcast_to(jnp.arange(4), probs.shape)
  return token_ids, jnp.log(probs), num_forwards + 1


@pytest.mark.parametrize(
  ('min_mass', 'num_steps'),
  [(0.3, 7), (0.2286, 8), (0.2, 9), (0.06, 11), (0.0, 11), (None, 11)],
)
def test_golden_stops(min_mass, num_steps):
  """Checked after each forward, not after every other one."""
  tree = tree_oracle.new_tree(
    np.zeros(1, np.int32), capacity=64, num_cache_rows=64
  )
  if min_mass is not None:
    min_mass = np.float32(min_mass)
  tree, num_forwards = grow(
    tree, 0, beam_draft, num_steps=11, width=4, min_mass=min_mass
  )
  assert num_forwards == num_steps
  leaves = leaf_mass(tree, 4)
  np.testing.assert_allclose(leaves, BEAMS[num_steps - 1].sum(), rtol=1e-5)


def test_rows_stop_for_themselves():
  roots = np.array([1, 3, 6, 16, 17, 5], np.int32)
  trees = tree_oracle.new_tree(roots, capacity=24, num_cache_rows=16)
  options = {'num_steps': 6, 'width': 2, 'num_nodes': 2}
  sizes = []
  for min_mass in (0.0, 0.3):
    least = np.full(len(roots), min_mass, np.float32)
    together, _ = grow(trees, 0, DRAFT, min_mass=least, **options)
    for row in range(len(roots)):
      alone = jax.tree.map(lambda x, row=row: x[row : row + 1], trees)
      alone, _ = grow(alone, 0, DRAFT, min_mass=least[:1], **options)
      jax.tree.map(
        lambda x, y, row=row: np.testing.assert_array_equal(x[row], y[0]),
        together,
        alone,
      )
    sizes.append(together.size)
  assert (sizes[1] <= sizes[0]).all()
  assert len(set(sizes[0] - sizes[1])) > 1


def test_leaves_below_leaves_do_not_count():
  chains = tree_oracle.new_tree(
    np.array([1], np.int32), capacity=24, num_cache_rows=16, chain_length=3
  )
  tree = grow(chains, 0, DRAFT, num_steps=1, width=2)[0]  # t2 and t3
  tree = add_chain(
    tree, np.array([[2, 9]], np.int32), np.array([[-0.75, -0.5]], np.float32)
  )
  nodes = best_candidates(tree, 3).nodes[0]
  token_ids = tree.nodes.token_ids[0, nodes]
  assert sorted(token_ids.tolist()) == [2, 3, 9]
  weights = tree.nodes.log_probs[0, nodes]
  np.testing.assert_allclose(
    leaf_mass(tree, 3)[0], np.exp(weights[token_ids != 9]).sum(), rtol=1e-6
  )


@pytest.mark.parametrize(
  ('mode', 'least'), [('serial', 0.9), ('serial', None), ('async', 0.9)]
)
def test_outputs_stay_and_forwards_go(mode, least):
  """By default, too, where draft and target take turns on a CPU."""
  target, draft = pair(*DEVICES[mode])
  requests = [*requests_of(3), *requests_of(2, temperature=1.0)]
  tree = dataclasses.replace(TREE, min_leaf_mass=least)
  results = run(ss.Decoder(target, draft, tree=tree, batch_size=3), requests)
  assert_same(results, run(ss.Decoder(target, batch_size=3), requests))
  if mode == 'serial':
    for stats in (result.stats for result in results):
      most = TREE.num_draft_steps * stats.num_rounds
      assert stats.num_draft_forwards < 0.9 * most


@pytest.mark.parametrize('least', [1.0, -0.1, float('nan')])
def test_bad_values_are_refused(least):
  with pytest.raises(errors.UserError, match='min_leaf_mass'):
    ss.TreeConfig(min_leaf_mass=least)
