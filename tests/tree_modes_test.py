"""Serial and asynchronous tree decoding: exactness, caches, what crosses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftspec_jax as ss
from swiftspec_jax import buckets, errors, profiling, testing
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.models import decoder

CONFIG = ModelConfig(
  family='llama',
  vocab_size=262,
  num_layers=2,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  ffw_dim=64,
  max_context=256,
)
TREE = TreeConfig(
  num_nodes=8,
  width=4,
  num_draft_steps=3,
  branching=4,
  num_restart_steps=1,
  capacity=64,
  num_cache_rows=32,
)
DEVICES = {
  'serial': ((0, 1), (0, 1)),
  'async': ((0, 1), (1, 2)),
}


@functools.cache
def pair(target_devices, draft_devices, draft_seed=0, vocab_size=262):
  """A target and a draft; the draft of seed 0 has the target's weights."""
  config = dataclasses.replace(CONFIG, vocab_size=vocab_size)
  devices = jax.devices()
  target = testing.random_model(config, devices=devices[slice(*target_devices)])
  draft = testing.random_model(
    config,
    seed=draft_seed,
    name='draft',
    devices=devices[slice(*draft_devices)],
  )
  return target, draft


def requests_of(num_requests, **sampling):
  rng = np.random.default_rng(3)
  return [
    ss.Request(
      token_ids=tuple(rng.integers(0, 256, rng.integers(1, 60)).tolist()),
      sampling=ss.SamplingParams(
        **{'max_new_tokens': int(rng.integers(1, 50)), 'seed': i, **sampling}
      ),
    )
    for i in range(num_requests)
  ]


def run(decoder, requests):
  found = {e.index: e.result for e in decoder.run(requests) if e.result}
  return [found[i] for i in range(len(requests))]


def assert_same(got, want):
  for one, other in zip(got, want, strict=True):
    assert one.token_ids == other.token_ids
    assert one.finish_reason == other.finish_reason


MIXED = [
  *requests_of(4),
  *requests_of(2, temperature=1.0),
  *requests_of(2, temperature=0.7, top_k=20, top_p=0.9),
]


@pytest.fixture(scope='module')
def plain():
  """What plain decoding makes of the mixed requests."""
  return run(ss.Decoder(pair((0, 1), (0, 1))[0]), MIXED)


@pytest.mark.parametrize('mode', DEVICES)
@pytest.mark.parametrize('draft_seed', [0, 1], ids=['own_draft', 'bad_draft'])
@pytest.mark.parametrize(
  ('batch_size', 'run_ahead'), [(1, 0), (1, 2), (3, 0), (3, 1)]
)
def test_output_is_that_of_plain_decoding(
  plain, mode, draft_seed, batch_size, run_ahead
):
  """Greedy and sampled; rows of different lengths come and go."""
  target, draft = pair(*DEVICES[mode], draft_seed)
  tree_decoder = ss.Decoder(
    target, draft, tree=TREE, batch_size=batch_size, run_ahead=run_ahead
  )
  assert tree_decoder.pipeline.is_async == (mode == 'async')
  assert_same(run(tree_decoder, MIXED), plain)


@pytest.mark.parametrize('num_nodes', [1, 4, 16])
@pytest.mark.parametrize('change', ['', 'coverage', 'is_adaptive'])
def test_sizes_and_switches_change_no_token(plain, num_nodes, change):
  tree = dataclasses.replace(
    TREE, num_nodes=num_nodes, **({change: 2} if change else {})
  )
  target, draft = pair(*DEVICES['async'])
  assert_same(run(ss.Decoder(target, draft, tree=tree), MIXED), plain)


@pytest.mark.parametrize(
  ('target_devices', 'draft_devices', 'vocab_size'),
  [((0, 2), (2, 3), 263), ((0, 6), (6, 8), 263)],
  ids=['2+1', '6+2'],
)
def test_splits_pad_and_stay_apart(target_devices, draft_devices, vocab_size):
  target, draft = pair(target_devices, draft_devices, vocab_size=vocab_size)
  requests = requests_of(3, max_new_tokens=20)
  alone, _ = pair((0, 1), (0, 1), vocab_size=vocab_size)
  tree_decoder = ss.Decoder(target, draft, tree=TREE, batch_size=2)
  assert_same(run(tree_decoder, requests), run(ss.Decoder(alone), requests))
  meshes = [set(model.mesh.devices.flat) for model in (target, draft)]
  assert not meshes[0] & meshes[1]
  pipeline = tree_decoder.pipeline
  states = (pipeline._target_rows.state, pipeline._draft_rows.state)
  for mesh, state in zip(meshes, states, strict=True):
    for array in jax.tree.leaves(state):
      assert array.sharding.device_set == mesh


FEATURES = {
  'penalty': {'repetition_penalty': 1.3},
  'bias': {'logit_bias': {7: 4.0}, 'banned_token_ids': (3, 5)},
  'forced': {'forced_token_ids': (1, 2, 3, 4, 5)},
  'logprobs': {'logprobs': True},
}


@pytest.mark.parametrize('feature', FEATURES)
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_sampling_features_hold_on_trees(feature, temperature):
  requests = requests_of(
    3, temperature=temperature, max_new_tokens=25, **FEATURES[feature]
  )
  target, draft = pair(*DEVICES['serial'])
  got = run(ss.Decoder(target, draft, tree=TREE, batch_size=2), requests)
  want = run(ss.Decoder(target), requests)
  assert_same(got, want)
  if feature == 'logprobs':
    for one, other in zip(got, want, strict=True):
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize('family', ['mistral', 'gemma3_text'])
def test_sliding_windows(tmp_path, family):
  """The windows are longer than the tree, and shorter than the text."""
  testing.write_tiny_checkpoint(tmp_path, family)
  devices = jax.devices()
  target = ss.load(tmp_path, devices=devices[:1])
  draft = ss.load(tmp_path, devices=devices[1:2], num_layers=1)
  tree = dataclasses.replace(TREE, capacity=32, num_cache_rows=14)
  requests = requests_of(2, max_new_tokens=40)
  got = run(ss.Decoder(target, draft, tree=tree), requests)
  assert_same(got, run(ss.Decoder(target), requests))
  with pytest.raises(errors.UserError, match='num_cache_rows=32 must be less'):
    ss.Decoder(target, draft, tree=TREE)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_drafts_that_propose_some_tokens_only(temperature):
  """The target's weights, so that most guesses are right; odd tokens only."""
  target, draft = pair(*DEVICES['serial'])
  odd = jnp.arange(1, 262, 2)
  draft = dataclasses.replace(
    draft,
    config=dataclasses.replace(draft.config, output_vocab_size=131),
    params={
      **draft.params,
      'unembedding': draft.params['embedding'][odd],
      'output_token_ids': odd,
    },
  )
  requests = requests_of(3, temperature=temperature, max_new_tokens=40)
  want = run(ss.Decoder(target), requests)
  got = run(ss.Decoder(target, draft, tree=TREE), requests)
  assert_same(got, want)
  assert sum(result.stats.num_accepted for result in got) > 0
  chain = run(ss.Decoder(target, draft), requests)
  assert sum(result.stats.num_accepted for result in chain) > 0
  if temperature == 0:
    assert_same(chain, want)


def start(mode, draft_seed=0, **changes):
  """A pipeline with one admitted request, to be driven round by round."""
  tree = dataclasses.replace(TREE, **changes)
  target, draft = pair(*DEVICES[mode], draft_seed)
  pipeline = ss.Decoder(target, draft, tree=tree).pipeline
  request = requests_of(1, max_new_tokens=150)[0]
  limit = len(request.token_ids) + 150
  pipeline.prepare(limit, [request.sampling])
  chunks = buckets.plan_prefill(len(request.token_ids) - 1, pipeline.capacity)
  pipeline.admit(0, request, limit, [request.sampling], chunks)
  return pipeline


@functools.partial(jax.jit, static_argnames='config')
def prefill(params, token_ids, config):
  """Keys and values of a text from scratch: [layers, 2, S, G, E]."""
  cache = dense.KVCacheConfig.of_model(config, 1, 256, 'float32')
  zeros = jnp.zeros((1, 2, 256, 8))
  _, cache = decoder.forward(
    params,
    config,
    token_ids,
    dense.KVCache(
      keys=[zeros] * cache.num_layers,
      values=[zeros] * cache.num_layers,
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


@pytest.mark.parametrize('mode', DEVICES)
@pytest.mark.parametrize('draft_seed', [0, 1], ids=['own_draft', 'bad_draft'])
def test_caches_equal_a_prefill_after_every_round(mode, draft_seed):
  pipeline = start(mode, draft_seed)
  outcomes = set()
  for _ in range(12):
    pipeline.dispatch()
    state = jax.device_get(pipeline._target_rows.state)
    draft_state = jax.device_get(pipeline._draft_rows.state)
    outcomes.add(int(draft_state.outcome[0]))
    length = int(state.lengths[0])
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
  if draft_seed == 1:
    assert tree_lib.MISS in outcomes
  elif mode == 'async':
    assert tree_lib.HIT in outcomes


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
  pipeline.admit(0, request, 200, [sampling], [(0, 32, 2)])
  pipeline.follow(pipeline._no_news)
  seen = set()
  for _ in range(60):
    verified, _ = pipeline.verify()
    pipeline.grow()
    after, moved = tree_lib.reroot(
      pipeline.tree,
      jax.device_put(verified[:, :-1], jax.devices()[1]),
      jax.device_put(verified[:, -1], jax.devices()[1]),
    )
    outcome, size = int(moved.outcome[0]), int(after.size[0])
    pipeline.follow(verified)
    num_forwards = int(np.asarray(pipeline._proposal)[0, -1])
    is_free = outcome == tree_lib.HIT and size >= tree.num_nodes
    assert (num_forwards == 0) == is_free
    seen.add((outcome, is_free))
  assert {(tree_lib.HIT, True), (tree_lib.MISS, False)} <= seen


def test_only_small_integers_cross_the_meshes(monkeypatch):
  pipeline = start('async')
  pipeline.dispatch()
  moved = []
  put = jax.device_put

  def spy(x, *args):
    moved.append((x.dtype.name, x.nbytes))
    return put(x, *args)

  monkeypatch.setattr(jax, 'device_put', spy)
  with jax.transfer_guard('disallow'):
    pipeline.dispatch()
  verdict, proposal = 4 * (TREE.num_nodes + 1), 4 * (3 * TREE.num_nodes + 3)
  assert moved == [('int32', verdict), ('int32', proposal)]


def test_verify_is_enqueued_first_and_nothing_is_read(monkeypatch):
  timeline = timeline_lib.Timeline()
  target, draft = pair(*DEVICES['async'])
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


@pytest.mark.parametrize('mode', DEVICES)
def test_nothing_is_compiled_after_warmup(mode):
  target, draft = pair(*DEVICES[mode])
  tree_decoder = ss.Decoder(target, draft, tree=TREE, batch_size=2)
  tree_decoder.warmup(200)
  with profiling.count_compilations() as compilations:
    run(tree_decoder, requests_of(12))
  assert compilations.count == 0


def test_adaptive_sizes_are_compiled_by_warmup():
  target, draft = pair(*DEVICES['async'])
  tree = dataclasses.replace(TREE, num_nodes=16, is_adaptive=True)
  tree_decoder = ss.Decoder(target, draft, tree=tree)
  tree_decoder.warmup(200)
  with profiling.count_compilations() as compilations:
    run(tree_decoder, requests_of(8))
  assert compilations.count == 0


@pytest.mark.parametrize('mode', DEVICES)
def test_faults_leave_the_next_request_alone(mode):
  target, draft = pair(*DEVICES[mode])
  tree_decoder = ss.Decoder(target, draft, tree=TREE, run_ahead=2)
  plain_decoder = ss.Decoder(target)
  usual = requests_of(1, max_new_tokens=30)
  first = run(plain_decoder, usual)[0].token_ids[0]

  events = tree_decoder.run(usual)
  next(events)
  events.close()  # in the middle of a round
  fills = [ss.Request(token_ids=(5,) * 250)]  # the context ends the output
  ends_at_once = [
    dataclasses.replace(usual[0], sampling=ss.SamplingParams(max_new_tokens=1))
  ]
  inside = [
    dataclasses.replace(usual[0], sampling=ss.SamplingParams(max_new_tokens=n))
    for n in (2, 3, 5)
  ]
  for requests in (usual, fills, ends_at_once, inside, usual):
    assert_same(run(tree_decoder, requests), run(plain_decoder, requests))

  config = dataclasses.replace(target.config, eos_token_ids=(first,))
  stopping = dataclasses.replace(target, config=config)
  result = run(ss.Decoder(stopping, draft, tree=TREE), usual)[0]
  assert result.token_ids == (first,)
  assert result.finish_reason == 'stop'


def test_impossible_settings_are_refused():
  target, draft = pair(*DEVICES['serial'])
  with pytest.raises(errors.UserError, match='from 1 to the capacity of 64'):
    dataclasses.replace(TREE, num_nodes=65)
  with pytest.raises(errors.UserError, match='needs a draft model, got none'):
    ss.Decoder(target, tree=TREE)
  with pytest.raises(errors.UserError, match='is for chains'):
    ss.Decoder(target, draft, tree=TREE, num_speculative_tokens=3)
  wide = dataclasses.replace(TREE, branching=300)
  with pytest.raises(errors.UserError, match='branching=300 is more than'):
    ss.Decoder(target, draft, tree=wide)
  overlapping = pair((0, 2), (1, 3))
  with pytest.raises(errors.UserError, match='share 1 of their devices'):
    ss.Decoder(*overlapping, tree=TREE)


@pytest.mark.parametrize('acceptance', [0.5, 1.0])
def test_forced_acceptance_is_as_often_right_as_told(acceptance):
  target, draft = pair(*DEVICES['async'], 1)
  requests = requests_of(3, max_new_tokens=150)
  plain_results = run(ss.Decoder(target), requests)
  tree = dataclasses.replace(
    TREE, forced_acceptance=acceptance, num_restart_steps=3
  )
  forced = [
    dataclasses.replace(request, reference_token_ids=result.token_ids)
    for request, result in zip(requests, plain_results, strict=True)
  ]
  results = run(ss.Decoder(target, draft, tree=tree), forced)
  assert_same(results, plain_results)
  drafted = sum(r.stats.drafted_per_position[0] for r in results)
  accepted = sum(r.stats.accepted_per_position[0] for r in results)
  if acceptance == 1.0:
    assert accepted >= drafted - len(results)  # the end of the text is unknown
  else:
    # One of the four children is right, unless the rank is four or more.
    assert abs(accepted / drafted - (1 - 0.5**4)) < 0.1
