"""Forced acceptance: children that are right as often as they are told."""

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax.drafting import forced_acceptance

NUM_CHILDREN = 4
ACCEPTANCE = 0.4


def force(children, token_id, position, seed=0):
  """One row, one leaf, whose text is 5, 6, 7, ..."""
  reference = forced_acceptance.make_reference(range(5, 105), seed, 128)
  children = jnp.asarray(children, jnp.int32)[None, None]
  token_ids, log_probs = jax.jit(
    forced_acceptance.force, static_argnames='acceptance'
  )(
    jax.tree.map(jnp.asarray, reference),
    children,
    jnp.zeros(children.shape),
    jnp.asarray([[token_id]]),
    jnp.asarray([[position]]),
    acceptance=ACCEPTANCE,
  )
  return np.asarray(token_ids[0, 0]), np.asarray(log_probs[0, 0])


def test_ranks_are_geometric_and_children_differ():
  ranks = []
  for position in range(98):
    for seed in range(8):
      truth = position + 6
      # The model itself has the truth at some place, or not at all.
      children = [truth if i == seed else 1000 + i for i in range(NUM_CHILDREN)]
      token_ids, log_probs = force(children, position + 5, position, seed)
      is_child = log_probs > -np.inf
      kept = token_ids[is_child].tolist()
      assert len(set(kept)) == len(kept) >= NUM_CHILDREN - 1
      ranks.append(kept.index(truth) if truth in kept else NUM_CHILDREN)
      chances = ACCEPTANCE * (1 - ACCEPTANCE) ** np.arange(NUM_CHILDREN)
      np.testing.assert_allclose(
        log_probs[is_child], np.log(chances)[is_child], rtol=1e-5
      )
  shares = np.bincount(ranks, minlength=NUM_CHILDREN + 1) / len(ranks)
  np.testing.assert_allclose(shares[:-1], chances, atol=0.05)


def test_leaves_off_the_text_keep_the_model_children():
  children = [20, 21, 22, 23]
  for token_id, position in ((9, 2), (104, 99), (3, 120)):
    token_ids, _ = force(children, token_id, position)
    assert token_ids.tolist() == children
