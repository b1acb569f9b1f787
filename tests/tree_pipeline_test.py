"""Rounds of the tree pipeline: caches, draft forwards, what crosses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_cases import run
from tree_cases import DEVICES, TREE, pair, requests_of

import swiftspec_jax as ss
from swiftspec_jax import buckets, testing, types
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.models import decoder
from swiftspec_jax.pipelines.tree_sizes import PAUSE, Sizes

# Narrow, so that chains are sent before they have keys and values.
HYBRID = {
  'prompt_lookup': True,
  'suffix_lookup': True,
  'width': 2,
  'num_draft_steps': 1,
}


def start(mode, draft_seed=0, **changes):
  """A pipeline with one admitted request, to be driven round by round."""
  tree = dataclasses.replace(TREE, **changes)
  target, draft = pair(*DEVICES[mode], draft_seed, num_layers=2)
  pipeline = ss.Decoder(target, draft, tree=tree).pipeline
  request = requests_of(2, max_new_tokens=150)[1]
  limit = len(request.token_ids) + 150
  pipeline.prepare(limit, [request.sampling])
  chunks = buckets.plan_prefill(len(request.token_ids) - 1, pipeline.capacity)
  pipeline.admit(0, request, limit, chunks)
  return pipeline


@functools.partial(jax.jit, static_argnames='config')
def prefill(params, token_ids, config):
  """Keys and values of a text from scratch: [layers, 2, S, G, E]."""
  zeros = [jnp.zeros((1, 2, 256, 8))] * config.num_layers
  _, cache = decoder.forward(
    params,
    config,
    token_ids,
    dense.KVCache(
      keys=zeros,
      values=zeros,
      kv_lengths=jnp.zeros(1, jnp.int32),
      capacity=256,
    ),
    starts=jnp.zeros(1, jnp.int32),
  )
  return jnp.stack([jnp.stack(cache.keys), jnp.stack(cache.values)], axis=1)


def rows_of(cache):
  return np.stack(
    [np.stack([k, v]) for k, v in zip(cache.keys, cache.values, strict=True)]
  )[:, :, 0]


def check_cache(model, cache, text, path_of_row):
  """Compares committed rows, and those of tree nodes, with a prefill."""
  length = int(cache.kv_lengths[0])
  paths = {length + row: path for row, path in path_of_row.items()}
  got = rows_of(cache)
  for row, path in [(length - 1, []), *paths.items()]:
    token_ids = np.zeros((1, 250), np.int32)
    known = [*text[:length], *path]
    token_ids[0, : len(known)] = known
    device = model.mesh.devices.flat[0]
    want = prefill(
      model.params, jax.device_put(token_ids, device), model.config
    )
    want = np.asarray(want)[:, :, 0]
    last = len(known) - 1
    np.testing.assert_allclose(
      got[:, :, :, row], want[:, :, :, last], atol=2e-5
    )
    if not path:
      np.testing.assert_allclose(
        got[:, :, :, :length], want[:, :, :, :length], atol=2e-5
      )


def path_tokens(tree, node):
  path = []
  while node >= 0:
    path.append(int(tree.token_ids[0, node]))
    node = int(tree.parents[0, node])
  return path[::-1]


@pytest.mark.parametrize(
  ('mode', 'changes'),
  [('serial', {}), ('async', {}), ('serial', HYBRID), ('async', HYBRID)],
  ids=['serial', 'async', 'serial_hybrid', 'async_hybrid'],
)
@pytest.mark.parametrize('draft_seed', [0, 1], ids=['own', 'bad'])
def test_caches_equal_a_prefill_after_every_round(mode, draft_seed, changes):
  pipeline = start(mode, draft_seed, **changes)
  outcomes, lengths = set(), []
  for _ in range(12):
    pipeline.dispatch()
    state = jax.device_get(pipeline._target_rows.state)
    draft_state = jax.device_get(pipeline._draft_rows.state)
    outcomes.add(int(draft_state.outcome[0]))
    length = int(state.lengths[0])
    lengths.append(length)
    text = state.token_ids[0, :length].tolist()
    assert state.target_cache.kv_lengths[0] == length - 1
    assert draft_state.cache.kv_lengths[0] == length - 1
    check_cache(pipeline._target, state.target_cache, text, {})
    tree = draft_state.tree
    paths = {
      int(slot): path_tokens(tree, node)
      for node, slot in enumerate(tree.cache_slots[0])
      if slot != tree_lib.NO_SLOT
    }
    some = {row: paths[row] for row in sorted(paths)[:: len(paths) // 3 or 1]}
    check_cache(pipeline._draft, draft_state.cache, text, some)
  if 'prompt_lookup' in changes:
    # More than the draft forwards of a round can have seen.
    assert max(np.diff(lengths)) > 5
  elif draft_seed == 1 and not changes:
    assert tree_lib.MISS in outcomes
  elif mode == 'async':
    assert tree_lib.HIT in outcomes


@pytest.mark.parametrize('mode', DEVICES)
@pytest.mark.parametrize('num_rounds', [1, 2, 70, 130])
def test_draft_catches_up_after_a_pause(mode, num_rounds):
  """Also where it was longer than what is taken in at once."""
  pipeline = start(mode)
  tree_sizes = Sizes(num_nodes=8, num_steps=3)
  pipeline.follow(tree_sizes)
  pipeline.verify()
  for _ in range(num_rounds):
    pipeline.follow(PAUSE)
    pipeline.verify()
  for _ in range(2):
    pipeline.follow(tree_sizes)
    state = jax.device_get(pipeline._target_rows.state)
    draft_state = jax.device_get(pipeline._draft_rows.state)
    length = int(state.lengths[0])
    text = state.token_ids[0, :length].tolist()
    assert state.target_cache.kv_lengths[0] == length - 1
    check_cache(pipeline._target, state.target_cache, text, {})
    assert draft_state.cache.kv_lengths[0] == length - 1
    check_cache(pipeline._draft, draft_state.cache, text, {})
    assert path_tokens(draft_state.tree, 0) == text[-1:]
    pipeline.verify()


def test_plain_rounds_leave_the_draft_alone():
  pipeline = start('async')
  pipeline.follow(PAUSE)
  before = pipeline._draft_rows.state
  for _ in range(5):
    output = pipeline.verify()
    assert int(output.packed[0, 0]) == 1  # token
    pipeline.follow(PAUSE)
  assert pipeline._draft_rows.state is before


def peaked_table(size=32, best=0.6):
  """Behind each token, one likely, one possible and many rare ones."""
  table = np.full((size, size), 0.1 / (size - 2))
  for i in range(size):
    table[i, (7 * i + 1) % size] = best
    table[i, (5 * i + 3) % size] = 0.9 - best
  return table / table.sum(axis=1, keepdims=True)


def table_pair(best=0.6, draft_best=0.6):
  devices = jax.devices()
  return (
    testing.table_model(peaked_table(best=best), devices=devices[:1]),
    testing.table_model(peaked_table(best=draft_best), devices=devices[1:2]),
  )


def test_a_hit_with_enough_survivors_needs_no_forward():
  target, draft = table_pair()
  tree = dataclasses.replace(TREE, num_nodes=4, num_restart_steps=0)
  pipeline = ss.Decoder(target, draft, tree=tree).pipeline
  sampling = ss.SamplingParams(temperature=1.0, seed=1)
  request = ss.Request(token_ids=(1, 2, 3), sampling=sampling)
  pipeline.prepare(200, [sampling])
  pipeline.admit(0, request, 200, [(0, 32, 2)])
  pipeline.follow()
  seen, reroot = set(), jax.jit(tree_lib.reroot)
  for _ in range(60):
    output = pipeline.verify()
    pipeline.grow()
    tokens = types.StepReport.unpack(np.asarray(output.packed)[0]).token_ids
    verified = np.pad(tokens, (0, tree.num_nodes - len(tokens)))[None]
    after, moved = reroot(
      pipeline.tree,
      *jax.device_put(
        (verified.astype(np.int32), np.array([len(tokens)], np.int32)),
        jax.devices()[1],
      ),
    )
    outcome, size = int(moved.outcome[0]), int(after.size[0])
    pipeline.follow()
    num_forwards = int(np.asarray(pipeline._proposal)[0, -1])
    is_free = outcome == tree_lib.HIT and size >= tree.num_nodes
    assert (num_forwards == 0) == is_free
    seen.add((outcome, is_free))
  assert {(tree_lib.HIT, True), (tree_lib.MISS, False)} <= seen


@pytest.mark.parametrize('changes', [{}, HYBRID], ids=['plain', 'hybrid'])
def test_only_small_integers_cross_the_meshes(monkeypatch, changes):
  pipeline = start('async', **changes)
  pipeline.dispatch()
  moved = []
  put = jax.device_put

  def spy(x, *args):
    moved.append((x.dtype.name, x.nbytes))
    return put(x, *args)

  monkeypatch.setattr(jax, 'device_put', spy)
  with jax.transfer_guard('disallow'):
    pipeline.dispatch()
  verdict, proposal = 4 * (TREE.num_nodes + 1), 4 * (5 * TREE.num_nodes + 3)
  moves = [('int32', verdict), ('int32', proposal)]
  assert moved == moves


def test_verify_is_enqueued_first_and_nothing_is_read(monkeypatch):
  timeline = timeline_lib.Timeline()
  target, draft = pair(*DEVICES['async'], num_layers=2)
  tree_decoder = ss.Decoder(
    target, draft, tree=TREE, run_ahead=2, timeline=timeline
  )
  run(tree_decoder, requests_of(1, max_new_tokens=12))
  spans = timeline.finish()
  last = max(span.round_index for span in spans)
  programs = [
    span.name
    for span in spans
    if span.round_index == last and span.track != timeline_lib.HOST
  ]
  assert programs == ['verify', 'grow', 'verdict', 'advance', 'proposal']
  # Two rounds were dispatched before the first output was waited for.
  host = [s.name for s in spans if s.track == timeline_lib.HOST]
  assert host[:4] == ['dispatch', 'dispatch', 'dispatch', 'wait']
