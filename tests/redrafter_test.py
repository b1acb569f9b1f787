"""ReDrafter: a recurrent head, and what the target makes of its drafts."""

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
from engine_cases import RandomLengths, assert_empty, make_sizes, results_of
from load_cases import read
from tree_cases import CONFIG, DEVICES, TREE, requests_of

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.config.architecture import Recurrent
from swiftspec_jax.distillation import losses, student, trainer, training
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder, recurrent
from swiftspec_jax.policies.fixed_length import FixedLength

WIDTH, VOCAB_SIZE = CONFIG.embed_dim, CONFIG.vocab_size
TEXT = tuple((np.arange(12) * 31 + 5) % VOCAB_SIZE)
SIZES = {'rows': (4,), 'lengths': (0, 9), 'draft_steps': (0, 3)}


@functools.partial(jax.jit, static_argnames=('config', 'length'))
def draft(params, token_id, before, *, config, length):
  """The best chain i32[D] after a token.

  Also the hidden states [D, E] that it comes of, the inputs of the unembedding
  [D, E] and the logits f32[D, V'].
  """
  found, hidden = [], before
  for _ in range(length):
    hidden, _ = decoder.run_layers(
      params,
      config,
      token_id[None, None],
      jnp.zeros((1, 1), jnp.int32),
      None,
      features_before=hidden,
    )
    x = decoder.before_unembedding(params, config, hidden)[0, 0]
    logits = decoder.unembed(params, config, hidden)[0, 0]
    token_id = jnp.argmax(logits).astype(jnp.int32)
    found.append((token_id, hidden[0, 0], x, logits))
  return [jnp.stack(values) for values in zip(*found, strict=True)]


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


def test_golden_recurrence():
  """What follows token 2, worked out by hand."""
  # The target's state, and zeros.
  start = np.array([[[1, -1, 0, 0]]], np.float32)
  chain, hidden, x, logits = map(
    np.asarray,
    draft(GOLDEN_PARAMS, np.int32(2), start, config=GOLDEN, length=3),
  )
  assert chain.tolist() == [0, 0, 0]
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  sums = log_probs[:, 0].cumsum()
  np.testing.assert_allclose(sums, [-0.5115, -1.0499, -1.6071], atol=1e-4)
  np.testing.assert_allclose(hidden[0], [1, -1, 0.7311, 0.7311], atol=1e-4)
  np.testing.assert_allclose(x[0], [1.2158, -0.7842, 0.7311, 0.7311], atol=1e-4)
  np.testing.assert_allclose(
    logits[0], [1.9469, -0.0531, 0.4316, 0.7842], atol=1e-4
  )
  np.testing.assert_allclose(
    np.exp(log_probs[0]), [0.5996, 0.0811, 0.1318, 0.1875], atol=1e-4
  )


@functools.cache
def target_of(*devices):
  devices = jax.devices()[slice(*devices)] if devices else None
  return testing.random_model(CONFIG, name='target', devices=devices)


def head_of(tmp_path, target, *, changes=(), vocab_size=VOCAB_SIZE, **sizes):
  """A random head as published, and its tensors."""
  sizes = {'head_width': 2 * WIDTH, **sizes}
  weights = cases.make_weights(WIDTH, vocab_size, **sizes)
  changes = {'width': WIDTH, 'vocab_size': vocab_size, **dict(changes)}
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


def draft_after(head, target, text, length):
  """The best chain of a head, and the logits of each of its tokens."""
  params, config = head.params, head.config
  _, features, _ = read(target, text, feature_layers=config.feature_layers)
  before = project_features(params, config, features[:, -2:-1])
  chain, *_, logits = draft(
    params, np.int32(text[-1]), before, config=config, length=length
  )
  return np.array(chain).tolist(), np.array(logits)


@pytest.mark.parametrize(
  'sizes',
  [
    {},
    {'head_width': 24, 'num_blocks': 1},
    {'rnn': False, 'num_blocks': 0},
    {'vocab_size': 200},  # without the padding of its target
  ],
)
def test_published_heads_are_those_of_numpy(tmp_path, sizes):
  target = target_of()
  weights, head = head_of(tmp_path, target, **sizes)
  distribution = distribution_of(weights, target, TEXT)
  chain, logits = draft_after(head, target, TEXT, 4)
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  for k in range(4):
    expected = distribution((TEXT[-1], *chain[:k]))
    assert chain[k] == expected.argmax()
    np.testing.assert_allclose(log_probs[k], expected, atol=1e-4)


def test_our_own_layout_holds_heads(tmp_path):
  target = target_of()
  _, head = head_of(tmp_path / 'theirs', target, head_width=24)
  draft_lib.save(tmp_path / 'ours', head.config, head.params, target)
  again = ss.load(tmp_path / 'ours', draft_of=target)
  assert again.config == head.config
  got, want = (draft_after(x, target, TEXT, 3) for x in (again, head))
  assert got[0] == want[0]
  np.testing.assert_allclose(got[1], want[1], atol=0.05)  # float16


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
  with pytest.raises(errors.UserError, match=message):
    head_of(tmp_path, target_of(), changes=change)
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
    directory, weights = tmp_path_factory.mktemp('head'), good_weights(target)
    cases.write(directory, weights, width=WIDTH, vocab_size=VOCAB_SIZE)
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
}


@pytest.mark.parametrize('kind', DRAFTS)
def test_the_engine_changes_no_token(good_pair, plain, kind):
  """Rows come and go; drafts have any length, and 0 tokens at times."""
  target, head = good_pair()
  policy = RandomLengths(0)
  engine = Engine(
    target, DRAFTS[kind](head), sizes=make_sizes(drafts=SIZES), policy=policy
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
  sizes, policy = make_sizes(drafts=SIZES), FixedLength(9)
  engine = Engine(target, DRAFTS['trees'](head), sizes=sizes, policy=policy)
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
  folders = tmp_path / 'data', tmp_path / 'head'
  devices = jax.devices()[:1]
  runner = trainer.Trainer(TRAINING, target, *folders, devices=devices)
  metrics = list(runner.run())
  for name in ('cross_entropy', 'loss'):  # the distributions are random, too
    assert metrics[-1][name] < 0.8 * metrics[0][name]
  assert metrics[-1]['agreement_3'] > metrics[0]['agreement_3']
  runner.save()
  head = ss.load(tmp_path / 'head', draft_of=target)
  np.testing.assert_array_equal(
    head.params['final_norm'], target.params['final_norm']
  )
  _, logits = draft_after(head, target, TEXT, 3)
  assert np.isfinite(logits).all()


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
