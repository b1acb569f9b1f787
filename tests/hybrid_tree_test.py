"""Trees that the known text drafts, too: exact, and better where it copies."""

import dataclasses

import jax
import numpy as np
import pytest
from decoding_cases import assert_same, run
from tree_cases import HYBRID, TREE, pair, requests_of

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.runtime import profiling

pytestmark = pytest.mark.usefixtures('no_programs')


def test_splits_and_adaptive_sizes_are_compiled_by_warmup():
  """The target's vocabulary is padded, and no state is on both meshes."""
  target, draft = pair((0, 2), (2, 3), vocab_size=263)
  alone, _ = pair((0, 1), (0, 1), vocab_size=263)
  requests = requests_of(3, max_new_tokens=20)
  tree = dataclasses.replace(HYBRID, num_nodes=4)
  tree_decoder = ss.Decoder(
    target, draft, tree=tree, batch_size=2, policy='goodput'
  )
  tree_decoder.warmup(128)
  with profiling.count_compilations() as compilations:
    results = run(tree_decoder, requests)
  assert compilations.count == 0
  assert_same(results, run(ss.Decoder(alone, batch_size=2), requests))
  engine = tree_decoder.engine
  of_target = engine._target.cache, engine._target.rows
  states = (of_target, engine.drafter.rows.state)
  for model, state in zip((target, draft), states, strict=True):
    for array in jax.tree.leaves(state):
      assert array.sharding.device_set == set(model.mesh.devices.flat)


def table_pair(*tables):
  devices = jax.devices()[:1]
  return [testing.table_model(table, devices=devices) for table in tables]


def test_a_text_that_repeats_is_copied():
  """The draft's best guess is always wrong; the text's period is 5 tokens."""
  cycle = np.eye(32)[[1, 2, 3, 4, 0, *range(5, 32)]]
  wrong = np.roll(np.eye(32), 7, axis=1)
  models = table_pair(cycle, 0.5 * wrong + 0.5 / 32)
  sampling = ss.SamplingParams(max_new_tokens=81)
  request = ss.Request(token_ids=(0, 1, 2, 3, 4, 0, 1), sampling=sampling)
  (result,) = run(ss.Decoder(*models, tree=HYBRID), [request])
  assert result.stats.num_rounds <= -(-81 // TREE.num_nodes) + 2


def test_text_that_repeats_by_chance_is_hardly_worse():
  """The draft knows the distribution; what the text says of it is only a
  sample."""
  rng = np.random.default_rng(0)
  table = rng.dirichlet(np.full(256, 0.05), 256)
  models = table_pair(table, table)
  requests = [
    ss.Request(
      token_ids=tuple(rng.integers(0, 256, 40).tolist()),
      sampling=ss.SamplingParams(temperature=1.0, seed=i, max_new_tokens=120),
    )
    for i in range(8)
  ]
  num_rounds = {
    name: sum(
      result.stats.num_rounds
      for result in run(ss.Decoder(*models, tree=tree, batch_size=4), requests)
    )
    for name, tree in (('model', TREE), ('hybrid', HYBRID))
  }
  assert num_rounds['hybrid'] <= 1.04 * num_rounds['model']
