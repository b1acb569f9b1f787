"""Drafts that read features of the target: exact in all modes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_cases import assert_same, run
from load_cases import read, rows_of
from tree_cases import (
  CONFIG,
  DEVICES,
  FEATURE_LAYERS,
  MIXED,
  TREE,
  Pauses,
  fed_pair,
  pair,
  path_to,
  plain,
  requests_of,
)

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.runtime import profiling, sharding
from swiftspec_jax.step import unread_tokens


def test_nothing_is_compiled_after_warmup():
  """It is first, as the others find its programs."""
  target, draft = fed_pair(*DEVICES['serial'])
  tree_decoder = ss.Decoder(
    target, draft, tree=TREE, batch_size=3, policy='goodput'
  )
  jax.clear_caches()
  tree_decoder.warmup(128, MIXED[-1].sampling)
  with profiling.count_compilations() as compilations:
    results = run(tree_decoder, MIXED)
  assert compilations.count == 0
  assert_same(results, plain(2))


def test_padded_splits():
  target, draft = fed_pair((0, 2), (2, 5), vocab_size=263)
  requests = requests_of(3, max_new_tokens=20)
  alone, _ = pair((0, 1), (0, 1), vocab_size=263, num_layers=2)
  tree_decoder = ss.Decoder(target, draft, tree=TREE, batch_size=2)
  assert_same(
    run(tree_decoder, requests), run(ss.Decoder(alone, batch_size=2), requests)
  )
  # Two devices share the features that they keep, and send whole ones.
  engine = tree_decoder.engine
  texts = engine._target.texts(engine.scheduler.table.pages)
  num_read = engine.drafter.rows._num_read
  width = len(FEATURE_LAYERS) * CONFIG.embed_dim
  shape = texts.features.sharding.shard_shape(texts.features.shape)
  assert shape[2] == width // 2
  (_, sent), _ = unread_tokens.unread_of(
    texts, num_read, jnp.ones_like(num_read, bool), num_nodes=TREE.num_nodes
  )
  assert sent.sharding.is_fully_replicated
  odd = sharding.make_mesh(jax.devices()[:3])
  assert sharding.of_kept_features(odd, width).is_fully_replicated


def rounds(mode, num_rounds, policy=None):
  """Yields the engine of one request after each round with a tree."""
  target, draft = fed_pair(*DEVICES[mode])
  request = requests_of(3, max_new_tokens=150)[2]
  tree_decoder = ss.Decoder(
    target, draft, tree=TREE, batch_size=3, run_ahead=0, policy=policy
  )
  with tree_decoder.engine_for([request]) as engine:
    engine.submit(request)
    while num_rounds:
      if engine.step().lengths.any():
        num_rounds -= 1
        yield engine


def features_before(target, draft, text, dtype=jnp.bfloat16):
  """What the draft reads with each token of a text, and with the next one."""
  _, features, _ = read(target, text, feature_layers=FEATURE_LAYERS)
  features = features.astype(dtype)
  table = np.asarray(draft.params['feature_projection'])
  projected = features.astype(np.float32) @ table
  return np.pad(projected, ((0, 0), (1, 0), (0, 0)))


def read_by_draft(engine):
  """What the draft had read of the text, and its state."""
  rows = engine.drafter.rows
  texts, num_read, state = jax.device_get(
    (engine._target.rows, rows._num_read, rows.state)
  )
  return texts.token_ids[0, : num_read[0]].tolist(), state


def assert_in_step(engine):
  """The draft has read the text with the target's features; the outcome."""
  target, draft = engine.model, engine.drafter.rows._model
  text, draft_state = read_by_draft(engine)
  length = len(text)
  assert draft_state.cache.kv_lengths[0] == length - 1
  before = features_before(target, draft, text)[:, :length]
  hidden, _, rows = read(draft, text, before)
  np.testing.assert_allclose(
    rows_of(draft_state.cache)[..., :length, :], rows, atol=2e-3
  )
  np.testing.assert_allclose(
    draft_state.features.of_rows[0, 0], hidden[0, -1], atol=5e-3
  )
  assert path_to(draft_state.tree, 0) == text[-1:]
  return int(draft_state.outcome[0])


@pytest.mark.parametrize('mode', DEVICES)
def test_verified_tokens_are_read_with_the_features_of_the_target(mode):
  """Keys and values of the prefix and of the root, and the root's feature."""
  outcomes = set(map(assert_in_step, rounds(mode, 10)))
  assert len(outcomes) > 1 or mode == 'serial'


@pytest.mark.parametrize(('mode', 'num_rounds'), [('serial', 1), ('async', 40)])
def test_a_pause_is_made_up_for(mode, num_rounds):
  """The draft reads all tokens of plain rounds with the target's features."""
  policy = Pauses(*range(4, 4 + num_rounds))
  *_, _ = map(assert_in_step, rounds(mode, 5, policy))


def test_nodes_are_read_with_features_of_the_draft():
  """In serial mode every node has been grown below a root that was read."""
  *_, engine = rounds('serial', 3)
  draft = engine.drafter.rows._model
  text, draft_state = read_by_draft(engine)
  length = int(draft_state.cache.kv_lengths[0])
  tree = draft_state.tree
  slots = tree.nodes.cache_slots[0]
  node = int(np.argmax(np.where(slots >= 0, tree.nodes.depths[0], -1)))
  path = path_to(tree, node)
  assert len(path) > 2
  before = features_before(engine.model, draft, text[:-1])
  for i in range(len(path)):
    known = [*text[:length], *path[: i + 1]]
    hidden, _, _ = read(draft, known, before)
    before = np.concatenate([before, hidden[:, -1:]], axis=1)
  np.testing.assert_allclose(
    draft_state.features.of_rows[0, slots[node]], hidden[0, -1], atol=5e-3
  )


def test_what_crosses_the_meshes(monkeypatch):
  """The same integers as without features, and one small float array."""
  moved = []
  put = jax.device_put

  def spy(x, *args):
    leaves = jax.tree.leaves(x)
    moved.extend(
      (leaf.dtype.name, leaf.nbytes)
      for leaf in leaves
      if isinstance(leaf, jax.Array)
    )
    return put(x, *args)

  found = rounds('async', 4)
  for _ in range(3):
    next(found)
  monkeypatch.setattr(jax, 'device_put', spy)
  next(found)
  verdict = 3 * 4 * (TREE.num_nodes + 1)
  proposal = 3 * 4 * (5 * TREE.num_nodes + 3)
  features = 3 * 2 * TREE.num_nodes * len(FEATURE_LAYERS) * CONFIG.embed_dim
  assert moved == [
    ('int32', verdict),
    ('bfloat16', features),
    ('int32', proposal),
  ]


def test_impossible_settings_are_refused():
  _, draft = fed_pair(*DEVICES['serial'])
  small = testing.random_model(
    dataclasses.replace(CONFIG, num_layers=1), name='small'
  )
  with pytest.raises(errors.UserError, match='small has 1 layers of 32'):
    ss.Decoder(small, draft, tree=TREE)
