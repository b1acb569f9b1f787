"""Forced acceptance: children that are right as often as they are told."""

import jax
import numpy as np

from swiftspec_jax.drafters.trees import forced_acceptance

NUM_CHILDREN = 4
ACCEPTANCE = 0.4


def force(children, token_ids, positions, seed=0):
  """One row, whose text is 5, 6, 7, ..., and W leaves; children [W, K]."""
  reference = forced_acceptance.make_reference(range(5, 105), seed, 128)
  children, token_ids, positions = (
    np.asarray(x, np.int32)[None] for x in (children, token_ids, positions)
  )
  token_ids, log_probs = jax.jit(
    forced_acceptance.force, static_argnames='acceptance'
  )(
    reference,
    children,
    np.zeros(children.shape, np.float32),
    token_ids,
    positions,
    acceptance=ACCEPTANCE,
  )
  return np.asarray(token_ids[0]), np.asarray(log_probs[0])


def test_ranks_are_geometric_and_children_differ():
  ranks, truths = [], np.arange(6, 104)
  for seed in range(8):
    # The model itself has the truth at some place, or not at all.
    children = [
      [truth if i == seed else 1000 + i for i in range(NUM_CHILDREN)]
      for truth in truths
    ]
    found = force(children, truths - 1, truths - 6, seed)
    for truth, token_ids, log_probs in zip(truths, *found, strict=True):
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
  children = [[20, 21, 22, 23]] * 3
  token_ids, _ = force(children, (9, 104, 3), (2, 99, 120))
  assert token_ids.tolist() == children
