"""ReDrafter: a recurrent head, beams as a tree, and what the target makes of
them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import redrafter_cases as cases
from decoding_cases import assert_same, run
from distillation_cases import target as tiny_target
from distillation_cases import write_data
from eagle3_test import project_features
from engine_cases import (
  RandomLengths,
  assert_empty,
  make_sizes,
  results_of,
  trees_of,
)
from feature_draft_test import read
from tree_cases import CONFIG, DEVICES, TREE, requests_of

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.config.architecture import Recurrent
from swiftspec_jax.distillation import losses, student, trainer, training
from swiftspec_jax.drafters.models import beam_search
from swiftspec_jax.drafters.models.beam_search import BeamDraft
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder, recurrent
from swiftspec_jax.policies.fixed_length import FixedLength

WIDTH, VOCAB_SIZE = CONFIG.embed_dim, CONFIG.vocab_size
TEXT = tuple((np.arange(12) * 31 + 5) % VOCAB_SIZE)
BEAMS = {'rows': (4,), 'lengths': (0, 9), 'draft_steps': (0, 3)}


def best_children(width):
  """Children by the distribution of the head alone."""

  def children(logits, depths):
    del depths
    log_probs, token_ids = jax.lax.top_k(jax.nn.log_softmax(logits), width)
    return token_ids, log_probs

  return children


@jax.jit
def _tree_of(paths, log_probs):
  num_beams, length = np.shape(paths)
  tree = tree_lib.new_tree(
    jnp.zeros(1, jnp.int32),
    capacity=1 + num_beams * length,
    num_cache_rows=1,
    chain_length=1 + length,
  )
  return tree_lib.add_chains(
    tree,
    jnp.asarray(paths, jnp.int32)[None],
    jnp.asarray(log_probs, jnp.float32)[None],
    is_looked_up=False,
  )


def tree_of(paths, log_probs):
  """What beams [W, D] become after a root."""
  return jax.device_get(_tree_of(paths, log_probs))


@functools.partial(jax.jit, static_argnames=('config', 'width', 'length'))
def search(params, token_id, before, num_steps, *, config, width, length):
  """Hidden state [E], the input of the unembedding [E], logits [V'], beams."""
  hidden, _ = decoder.run_layers(
    params,
    config,
    token_id[None, None],
    jnp.zeros((1, 1), jnp.int32),
    None,
    features_before=before,
  )
  logits = decoder.unembed(params, config, hidden)
  paths, log_probs = beam_search.search(
    params,
    hidden[0],
    logits[0],
    best_children(width),
    num_steps,
    config=config,
    width=width,
    length=length,
  )
  x = decoder.before_unembedding(params, config, hidden)
  return hidden[0, 0], x[0, 0], logits[0, 0], paths[0], log_probs[0]


@pytest.mark.parametrize(
  ('beams', 'token_ids', 'depths', 'parents'),
  [
    (
      [[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]],
      [91, 92, 93, 95, 94, 96, 97],
      [0, 1, 2, 3, 2, 3, 3],
      [-1, 0, 1, 2, 1, 4, 2],
    ),
    (  # equal ends are no equal beginnings
      [[7, 1, 2, 3], [7, 1, 4, 3], [7, 5, 4, 3]],
      [7, 1, 2, 3, 4, 3, 5, 4, 3],
      [0, 1, 2, 3, 2, 3, 1, 2, 3],
      [-1, 0, 1, 2, 1, 4, 0, 6, 7],
    ),
  ],
)
def test_beams_that_begin_alike_share_nodes(beams, token_ids, depths, parents):
  """Golden examples of the paper's code."""
  expected = cases.prefix_tree(beams)
  assert expected['token_ids'] == token_ids
  assert (expected['depths'], expected['parents']) == (depths, parents)
  paths = np.array(beams)[:, 1:]
  tree = tree_of(paths, np.zeros(paths.shape))
  size = int(tree.size[0])
  assert size == len(token_ids)
  assert tree.token_ids[0, 1:size].tolist() == token_ids[1:]
  assert tree.depths[0, :size].tolist() == depths
  assert tree.parents[0, :size].tolist() == parents
  assert not tree.is_looked_up.any()


def test_random_beams_are_merged_and_found_again():
  generator = np.random.default_rng(0)
  for _ in range(20):
    paths = generator.integers(0, 3, (4, 4))
    expected = cases.prefix_tree([(9, *path) for path in paths.tolist()])
    tree = tree_of(paths, np.full(paths.shape, -0.5))
    size = int(tree.size[0])
    assert tree.token_ids[0, 1:size].tolist() == expected['token_ids'][1:]
    assert tree.parents[0, :size].tolist() == expected['parents']
    nodes = {()}
    for node in range(1, size):
      path = []
      while node:
        path.append(int(tree.token_ids[0, node]))
        node = int(tree.parents[0, node])
      nodes.add(tuple(path[::-1]))
    assert {tuple(path) for path in paths.tolist()} <= nodes


GOLDEN = recurrent.config_of(
  dataclasses.replace(CONFIG, vocab_size=4, embed_dim=2),
  Recurrent(num_blocks=1, width=4),
)
GOLDEN_PARAMS = {
  'embedding': np.float32([[1, 0], [0, 1], [1, 1], [-1, 0]]),
  'layers': [],
  'final_norm': np.ones(2, np.float32),
  'recurrence': {
    'weight': np.float32([[1, 0], [0, 1], [0.5, 0], [0, 0.5]]),
    'bias': np.zeros(2, np.float32),
  },
  'blocks': [
    {
      'weight': np.float32([[0] * 4, [0] * 4, [0.5, 0, 0, 0], [0, 0.5, 0, 0]]),
      'bias': np.zeros(4, np.float32),
    }
  ],
  'unembedding': np.float32(
    [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, -1, 1, -1]]
  ),
}


def test_golden_recurrence_and_beams():
  """Two beams after token 2, worked out by hand."""
  # The target's state, and zeros.
  start = np.array([[[1, -1, 0, 0]]], np.float32)
  sums = {1: [-0.5115, -1.6741], 2: [-1.0499, -1.6667], 3: [-1.6071, -2.0943]}
  for length, totals in sums.items():
    found = search(
      GOLDEN_PARAMS,
      np.int32(2),
      start,
      length - 1,
      config=GOLDEN,
      width=2,
      length=3,
    )
    hidden, x, logits, paths, log_probs = map(np.asarray, found)
    best = [*[0] * (length - 1), 0], [*[0] * (length - 1), 3]
    assert paths[:, :length].tolist() == list(best)
    found = np.where(log_probs > -np.inf, log_probs, 0).sum(axis=1)
    np.testing.assert_allclose(found, totals, atol=1e-4)
  np.testing.assert_allclose(hidden, [1, -1, 0.7311, 0.7311], atol=1e-4)
  np.testing.assert_allclose(x, [1.2158, -0.7842, 0.7311, 0.7311], atol=1e-4)
  np.testing.assert_allclose(
    logits, [1.9469, -0.0531, 0.4316, 0.7842], atol=1e-4
  )
  probs = np.exp(logits) / np.exp(logits).sum()
  np.testing.assert_allclose(probs, [0.5996, 0.0811, 0.1318, 0.1875], atol=1e-4)


@functools.cache
def target_of(*devices):
  devices = jax.devices()[slice(*devices)] if devices else None
  return testing.random_model(CONFIG, name='target', devices=devices)


def head_of(tmp_path, target, *, changes=(), **sizes):
  """A random head as published, and its tensors."""
  sizes = {'head_width': 2 * WIDTH, **sizes}
  weights = cases.make_weights(WIDTH, VOCAB_SIZE, **sizes)
  changes = {'width': WIDTH, 'vocab_size': VOCAB_SIZE, **dict(changes)}
  cases.write(tmp_path, weights, **changes)
  return weights, ss.load(tmp_path, draft_of=target)


def context_of(target, text):
  """The target's last hidden state before the last token, after the norm."""
  _, features, _ = read(target, text, feature_layers=(CONFIG.num_layers - 1,))
  x = np.asarray(features, np.float64)[0, -2]
  norm = np.asarray(target.params['final_norm'])
  return x / np.sqrt((x * x).mean() + CONFIG.norm_eps) * norm


def distribution_of(weights, target, text):
  """The head's distribution after paths that begin with the last token of a
  text."""
  table = np.asarray(target.params['embedding'], np.float64)
  return functools.partial(
    cases.log_probs, weights, table, context_of(target, text)
  )


def paths_of(draft, target, text, width, length):
  """What our beam search finds after a text, and the logits after it."""
  params, config = draft.params, draft.config
  _, features, _ = read(target, text, feature_layers=config.feature_layers)
  before = project_features(params, config, features[:, -2:-1])
  *_, logits, paths, log_probs = search(
    params,
    np.int32(text[-1]),
    before,
    length - 1,
    config=config,
    width=width,
    length=length,
  )
  return np.array(paths), np.array(log_probs), np.array(logits)


@pytest.mark.parametrize(
  ('head_width', 'rnn', 'num_blocks'),
  [(2 * WIDTH, True, 2), (24, True, 1), (2 * WIDTH, False, 0)],
)
def test_published_heads_are_those_of_numpy(
  tmp_path, head_width, rnn, num_blocks
):
  target = target_of()
  weights, draft = head_of(
    tmp_path, target, head_width=head_width, rnn=rnn, num_blocks=num_blocks
  )
  distribution = distribution_of(weights, target, TEXT)
  for width, length in ((1, 4), (3, 3)):
    paths, log_probs, logits = paths_of(draft, target, TEXT, width, length)
    log_probs_of_one = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(
      log_probs_of_one, distribution(TEXT[-1:]), atol=1e-4
    )
    expected = cases.beams(distribution, TEXT[-1], width, length)
    assert [tuple(path) for path in paths.tolist()] == [x[0] for x in expected]
    sums = [total for _, total in expected]
    np.testing.assert_allclose(log_probs.sum(axis=1), sums, atol=1e-4)


def test_a_head_may_lack_the_padding_of_its_target(tmp_path):
  target = target_of()
  weights = cases.make_weights(WIDTH, 200, head_width=2 * WIDTH)
  cases.write(tmp_path, weights, width=WIDTH, vocab_size=200)
  draft = ss.load(tmp_path, draft_of=target)
  paths, _, _ = paths_of(draft, target, TEXT, 2, 3)
  expected = cases.beams(distribution_of(weights, target, TEXT), TEXT[-1], 2, 3)
  assert [tuple(path) for path in paths.tolist()] == [x[0] for x in expected]


def test_our_own_layout_holds_heads(tmp_path):
  target = target_of()
  _, draft = head_of(tmp_path / 'theirs', target, head_width=24)
  draft_lib.save(tmp_path / 'ours', draft.config, draft.params, target)
  again = ss.load(tmp_path / 'ours', draft_of=target)
  assert again.config == draft.config
  for got, want in zip(
    paths_of(again, target, TEXT, 3, 3),
    paths_of(draft, target, TEXT, 3, 3),
    strict=True,
  ):
    np.testing.assert_allclose(got, want, atol=0.05)  # float16


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'rnn': False}, 'tensor rnn_u.bias is not of a ReDrafter'),
    ({'exit_dim': 24}, r'lm_head.0.linear.weight has shape \(64, 64\)'),
    ({'num_draft_layers': 3}, 'lm_head.2.linear.weight is missing'),
    ({'num_draft_layers': '2'}, "num_draft_layers='2' must be a number"),
    ({'hidden_size': 16}, 'hidden_size=16 and vocab_size=262 are not'),
    ({'vocab_size': 300}, 'vocab_size=300 are not those of target, 32 and 262'),
  ],
)
def test_bad_heads_are_refused(tmp_path, change, message):
  weights = cases.make_weights(WIDTH, VOCAB_SIZE, head_width=2 * WIDTH)
  names = {'width': WIDTH, 'vocab_size': VOCAB_SIZE, **change}
  cases.write(tmp_path, weights, **names)
  with pytest.raises(errors.UserError, match=message):
    ss.load(tmp_path, draft_of=target_of())
  with pytest.raises(errors.UserError, match='cannot be loaded alone'):
    ss.load(tmp_path)


OUTWARD = 'attention_out', 'down'  # matrices that lead out of a layer


def good_weights(target):
  """A head that expects what the target says of its last token alone.

  silu is the identity for numbers around 20, so the state is the embedding of
  the newest token.
  """
  shift = np.full(WIDTH, 20, np.float32)
  eye, zeros = np.eye(WIDTH, dtype=np.float32), np.zeros((WIDTH, WIDTH))
  return {
    'rnn_w.weight': eye,
    'rnn_u.weight': zeros.astype(np.float32),
    'rnn_u.bias': shift,
    'input_proj.weight': np.concatenate([0 * eye, eye], axis=1),
    'input_proj.bias': -shift,
    'lm_head.0.weight': np.asarray(target.params['unembedding']),
  }


@pytest.fixture(scope='module')
def good_pair(tmp_path_factory):
  """Returns a function that makes a target, and a head that is often right."""

  @functools.cache
  def make(target_devices=(0, 1), draft_devices=(0, 1)):
    devices = jax.devices()
    target = testing.random_model(
      dataclasses.replace(CONFIG, tie_embeddings=False),
      name='target',
      devices=devices[slice(*target_devices)],
    )
    layers = [
      {
        name: jax.tree.map(lambda x: 0.1 * x, x) if name in OUTWARD else x
        for name, x in layer.items()
      }
      for layer in target.params['layers']
    ]
    params = {**target.params, 'layers': layers}
    target = dataclasses.replace(target, params=params)
    directory = cases.write(
      tmp_path_factory.mktemp('head'),
      good_weights(target),
      width=WIDTH,
      vocab_size=VOCAB_SIZE,
    )
    devices = devices[slice(*draft_devices)]
    return target, ss.load(directory, draft_of=target, devices=devices)

  return make


MIXED = [
  *requests_of(4),
  *requests_of(2, temperature=1.0),
  *requests_of(2, temperature=0.7, top_k=20, top_p=0.9),
]


@pytest.fixture(scope='module')
def plain(good_pair):
  """What plain decoding makes of the mixed requests."""
  return run(ss.Decoder(good_pair()[0], batch_size=3), MIXED)


def num_accepted(results):
  return sum(result.stats.num_accepted for result in results)


@pytest.mark.parametrize('mode', DEVICES)
def test_living_trees_change_no_token(good_pair, plain, mode):
  target, draft = good_pair(*DEVICES[mode])
  results = run(ss.Decoder(target, draft, tree=TREE, batch_size=3), MIXED)
  assert_same(results, plain)
  assert num_accepted(results) > 50


DRAFTS = {
  'chains': lambda head: head,
  'trees': lambda head: TreeDraft(model=head, width=2, branching=3),
  'beams': lambda head: BeamDraft(model=head, width=3, suffix_lookup=True),
}


@pytest.mark.parametrize('kind', DRAFTS)
def test_the_engine_changes_no_token(good_pair, plain, kind):
  """Rows come and go; drafts have any length, and 0 tokens at times."""
  target, head = good_pair()
  policy = RandomLengths(0)
  engine = Engine(
    target, DRAFTS[kind](head), sizes=make_sizes(drafts=BEAMS), policy=policy
  )
  results = results_of(engine, MIXED)
  assert_same(results, plain)
  assert num_accepted(results) > 50
  assert_empty(engine)
  drafted = [outcome.drafts.lengths for outcome in policy.outcomes]
  assert not all(lengths.any() for lengths in drafted)


def test_prompts_are_never_late(good_pair):
  """A head has nothing to read of a text, so it drafts in the first step."""
  target, head = good_pair()
  engine = Engine(
    target,
    DRAFTS['beams'](head),
    sizes=make_sizes(drafts=BEAMS),
    policy=FixedLength(9),
  )
  late, draft_fn = [], engine.drafter.draft

  def draft(view, lengths, texts):
    drafts = draft_fn(view, lengths, texts)
    late.append(drafts.prefills_draft or drafts.is_late is not None)
    return drafts

  engine.drafter.draft = draft
  request = dataclasses.replace(MIXED[4], token_ids=tuple(range(100)))
  engine.submit(request).result()
  assert late
  assert not any(late)


def test_trees_of_the_engine_are_the_beams_of_numpy(tmp_path):
  """Best first; what beams have in common is one node."""
  target = target_of()
  weights, head = head_of(tmp_path, target)
  engine = Engine(
    target,
    BeamDraft(model=head, width=3, prompt_lookup=False),
    sizes=make_sizes(drafts=BEAMS),
    policy=FixedLength(9),
  )
  found, draft_fn = [], engine.drafter.draft

  def draft(view, lengths, texts):
    drafts = draft_fn(view, lengths, texts)
    trees = trees_of(drafts)
    for row in np.flatnonzero(drafts.drafts.lengths).tolist():
      slot = view.slots[row]
      found.append(
        (
          texts.known_from(view, row, 0),
          trees.token_ids[slot, 1:],
          trees.parents[slot],
          np.exp(trees.log_probs[slot, 1:]),
        )
      )
    return drafts

  engine.drafter.draft = draft
  for request in requests_of(2, max_new_tokens=6, ignore_eos=True):
    engine.submit(request).result()
  assert len(found) > 4
  for text, token_ids, parents, probs in found:
    if len(text) < 2:
      continue
    distribution = distribution_of(weights, target, text)
    nodes = {}
    for path, _ in cases.beams(distribution, text[-1], 3, 3):
      total = 0.0
      for k in range(3):
        total += distribution((text[-1], *path[:k]))[path[k]]
        nodes[path[: k + 1]] = total
    expected = sorted(nodes, key=lambda path: -nodes[path])
    paths = [()]
    for token, parent in zip(
      token_ids.tolist(), parents[1:].tolist(), strict=True
    ):
      if parent < 0:  # fewer nodes than were asked for
        break
      paths.append((*paths[parent], token))
    assert paths[1:] == expected
    sums = [np.exp(nodes[path]) for path in expected]
    np.testing.assert_allclose(probs[: len(sums)], sums, atol=5e-3)


def test_beams_of_other_models_are_refused():
  with pytest.raises(errors.UserError, match='beams need a recurrent head'):
    BeamDraft(model=target_of())


def test_more_beams_than_tokens_are_refused(tmp_path):
  _, head = head_of(tmp_path, target_of())
  with pytest.raises(errors.UserError, match='width must be 1 to 262, got 263'):
    BeamDraft(model=head, width=263)
  with pytest.raises(errors.UserError, match='less than 10 nodes after 3'):
    Engine(
      target_of(),
      BeamDraft(model=head, width=3),
      sizes=make_sizes(
        drafts={**BEAMS, 'lengths': (0, 10), 'draft_steps': (0, 3)}
      ),
    )


HEAD = student.StudentConfig(
  recurrent=Recurrent(num_blocks=1, width=32),
  output_vocab_size=100,
  feature_layers=(2,),
)
TRAINING = training.TrainingConfig(
  student=HEAD,
  loss=losses.LossWeights(),
  num_steps=40,
  tokens_per_batch=2048,
  warmup_steps=2,
  learning_rate=2e-2,
  prompt_weight=0.5,
)


def test_training_learns_and_its_head_drafts(tmp_path):
  """With teacher forcing over three tokens, as decoding runs it."""
  write_data(tmp_path / 'data', feature_layers=(2,))
  target = tiny_target()
  runner = trainer.Trainer(
    TRAINING,
    target,
    tmp_path / 'data',
    tmp_path / 'head',
    devices=jax.devices()[:1],
  )
  metrics = list(runner.run())
  for name in ('cross_entropy', 'loss'):  # the distributions are random, too
    assert metrics[-1][name] < 0.8 * metrics[0][name]
  assert metrics[-1]['agreement_3'] > metrics[0]['agreement_3']
  runner.save()
  head = ss.load(tmp_path / 'head', draft_of=target)
  np.testing.assert_array_equal(
    head.params['final_norm'], target.params['final_norm']
  )
  _, log_probs, _ = paths_of(head, target, TEXT, 1, 3)
  assert np.isfinite(log_probs).all()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_layers': 1}, 'leave out init_layers, num_layers'),
    ({'feature_layers': (1,)}, r'feature_layers=\(1,\) must be \(2,\)'),
  ],
)
def test_bad_heads_are_not_trained(changes, message):
  with pytest.raises(errors.UserError, match=message):
    dataclasses.replace(HEAD, **changes).model_config(tiny_target().config)
