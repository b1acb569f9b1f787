"""Trees that live on under a policy, over pages and beside verification."""

import dataclasses

import eagle3_cases
import engine_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_test import features_of, small_pair
from engine_cases import RandomLengths, assert_empty, random_requests
from load_cases import check, read, serve
from tree_cases import CONFIG, DEVICES, TREE

from swiftspec_jax import errors, testing
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.drafters.texts.suffix_lookup import SuffixLookup
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.runtime import profiling
from swiftspec_jax.tree import types

pytestmark = pytest.mark.usefixtures('no_programs')

SIZES = {
  'rows': (4,),
  'lengths': tuple(range(8)),
  'draft_steps': (0,) + (1,) * 7,
}
NUM_PAGES = 25  # one row may own 20
# Devices of target and draft, whose programs take the longest: they are the
# first ones, and the same in most modes. Other tests split the draft.
SPLITS = {'serial': (1, 0), 'async': (1, 1), 'three': (2, 1)}


def make_models(split):
  """A target, and a draft that is right most of the time."""
  num_target, num_draft = SPLITS[split]
  devices = jax.devices()[: num_target + num_draft]
  target = testing.random_model(CONFIG, devices=devices[num_draft:])
  draft = testing.random_model(
    dataclasses.replace(CONFIG, num_layers=1),
    devices=devices[:num_draft] or devices,
  )
  return target, draft


def make_engine(
  target,
  draft,
  policy,
  num_pages=NUM_PAGES,
  run_ahead=0,
  looks_up=False,
  **tree,
):
  tree = dataclasses.replace(TREE, **{'prompt_lookup': True, **tree})
  return Engine(
    target,
    PersistentTrees(model=draft, tree=tree),
    sizes=engine_cases.make_sizes(num_pages=num_pages, drafts=SIZES),
    policy=policy,
    looks_up=looks_up,
    run_ahead=run_ahead,
  )


@pytest.mark.parametrize(
  ('split', 'run_ahead', 'tree'),
  [
    (
      'serial',
      2,
      {'waits_for_misses': True, 'min_leaf_mass': 0.3, 'looks_up': True},
    ),
    ('async', 0, {'waits_for_misses': True}),
    ('async', 2, {'looks_up': True}),
    ('three', 0, {}),
  ],
)
def test_outputs_are_those_of_plain_decoding(split, run_ahead, tree):
  target, draft = make_models(split)
  policy = RandomLengths(0, share_of_none=0.1)
  engine = make_engine(target, draft, policy, run_ahead=run_ahead, **tree)
  requests = random_requests(10, seed=6)
  results = serve(engine, requests, seed=2)
  check(requests, results)
  assert engine.scheduler.num_preemptions > 0
  assert sum(result.stats.num_accepted for result in results) > 0
  assert_empty(engine, NUM_PAGES)


def arrays_of(cache):
  return [*cache.keys, *cache.values]


def assert_fresh(rows, model, text):
  """Arrays [G, n, E] of a row are those of a text that is read at once."""
  _, _, (keys, values) = read(model, text)
  for row, fresh in zip(rows, [*keys, *values], strict=True):
    np.testing.assert_allclose(row, fresh[:, : row.shape[1]], atol=1e-5)


@pytest.mark.parametrize(('split', 'run_ahead'), [('serial', 0), ('async', 1)])
def test_caches_are_those_of_a_fresh_prefill(split, run_ahead):
  """Whatever was rejected, left out, preempted or in a slot before.

  The devices are where the host will only know that they are.
  """
  target, draft = make_models(split)
  engine = make_engine(target, draft, RandomLengths(3), run_ahead=run_ahead)
  for request in random_requests(7, seed=5):
    engine.submit(request)
  num_checked, shape = 0, (CONFIG.num_kv_heads, CONFIG.head_dim)
  for _ in range(40):
    engine.step()
    drafter, scheduler = engine.drafter, engine.scheduler
    texts, cache, pages = jax.device_get(
      (engine._target.rows, drafter.rows.state.cache, engine._target.cache)
    )
    for slot in np.flatnonzero(scheduler.request_ids >= 0):
      is_new = drafter._generations[slot] != scheduler.slot_generations[slot]
      if is_new or drafter._num_read[slot] < 2:
        continue
      # The root has no keys and values, nor the token before it after a miss.
      known = int(cache.kv_lengths[slot])
      assert int(drafter.rows._num_read[slot]) - known in (1, 2)
      text = texts.token_ids[slot, : texts.lengths[slot] - 1].tolist()
      assert_fresh([x[slot, :, :known] for x in arrays_of(cache)], draft, text)
      table = scheduler.table.pages[slot, : -(-len(text) // 8)]
      rows = [x[table].reshape(-1, *shape) for x in arrays_of(pages)]
      rows = [x[: len(text)].swapaxes(0, 1) for x in rows]
      assert_fresh(rows, target, text)
      num_checked += 1
  assert num_checked > 40


def new_chains(target, draft):
  """Texts, and the chains that a draft grew from nothing after them.

  After prompts that share pages and rounds without drafts.
  """
  chain = {'width': 1, 'branching': 1, 'prompt_lookup': False}
  engine = make_engine(target, draft, RandomLengths(0), 160, **chain)
  found, draft_fn = [], engine.drafter.draft

  def recorded(view, lengths, texts):
    drafts = draft_fn(view, lengths, texts)
    for row in np.flatnonzero(drafts.drafts.lengths):
      slot = view.slots[row]
      trees = types.TreeProposal.unpack(np.asarray(drafts.trees))
      if trees.outcome[slot] in (types.NO_OUTCOME, tree_lib.MISS):
        found.append(
          (texts.known_from(view, row, 0), trees.token_ids[slot, 1:])
        )
    return drafts

  engine.drafter.draft = recorded
  requests = random_requests(8, seed=4)
  for _ in range(2):
    check(requests, serve(engine, requests, seed=4), target)
  assert engine.scheduler.num_shared_tokens > 0
  # In async mode a new tree is a root until the target has verified it.
  trees = [(text, tokens[tokens >= 0].tolist()) for text, tokens in found]
  trees = [tree for tree in trees if tree[1]]
  assert len(trees) > 10
  return trees


@pytest.mark.parametrize('mode', DEVICES)
def test_drafts_read_features_of_the_pages(mode, tmp_path):
  """Those of an EAGLE-3 head, whose oracle knows nothing of pages."""
  weights, target, draft = small_pair(tmp_path, *DEVICES[mode])
  table = np.asarray(target.params['embedding'])
  chains = new_chains(target, draft)
  for i in np.random.default_rng(0).choice(len(chains), 10, replace=False):
    text, tokens = chains[i]
    features = features_of(target, text[:-1], (0, 1))
    features = features.astype(jnp.bfloat16).astype(np.float32)
    expected, _ = eagle3_cases.draft(
      weights, table, text, features, len(tokens)
    )
    assert tokens == expected


def test_nothing_is_compiled_after_warm_up():
  target, draft = make_models('async')
  engine = make_engine(target, draft, RandomLengths(2))
  engine.programs.compile_all()
  with profiling.count_compilations() as compilations:
    serve(engine, random_requests(8, seed=1), seed=1)
  assert compilations.count == 0


@pytest.mark.parametrize(
  ('kernels', 'width'), [('native', 4), ('reference', 8)]
)
def test_cpus_expand_fewer_leaves(kernels, width):
  config = dataclasses.replace(CONFIG, head_dim=16, kernels=kernels)
  model = testing.random_model(config, devices=jax.devices()[:1])
  engine = make_engine(model, model, None, width=None)
  assert f'_serial_{width}_' in engine.drafter.name


def test_bad_sizes_are_refused():
  target, draft = make_models('async')
  with pytest.raises(errors.UserError, match='num_nodes=9 must be 8'):
    make_engine(target, draft, None, num_nodes=9)
  with pytest.raises(errors.UserError, match='is_adaptive=True has no effect'):
    make_engine(target, draft, None, is_adaptive=True)
  with pytest.raises(errors.UserError, match='run_ahead must be at least 0'):
    make_engine(target, draft, None, run_ahead=-1)
  sizes = engine_cases.make_sizes()
  with pytest.raises(errors.UserError, match='=1 needs PersistentTrees'):
    Engine(target, SuffixLookup(), sizes=sizes, run_ahead=1)
