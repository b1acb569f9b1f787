"""DFlash drafts: loaded, compared with an oracle, exact in engines."""

import functools
import heapq

import dflash_cases as cases
import jax
import numpy as np
import pytest
from eagle3_test import TEXT, features_of, target_of
from engine_cases import RandomLengths, assert_empty, make_sizes, results_of
from engine_feature_test import check_drafts, record_drafts
from tree_cases import CONFIG, TREE, requests_of

import swiftspec_jax as ss
from kernels_pallas.paged_attention import pallas_gpu, pallas_tpu, reference
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.runtime import profiling

pytestmark = pytest.mark.usefixtures('no_programs')

VOCAB_SIZE, WIDTH = CONFIG.vocab_size, CONFIG.embed_dim
LAYERS = (0, 1)
LENGTH = cases.BLOCK - 1
SLIDING = {
  'use_sliding_window': True,
  'sliding_window': 8,
  'layer_types': ['sliding_attention'] * 2,
}
KINDS = {
  'z-lab': ({'layout': 'z-lab'}, {}),
  'speculators': ({'layout': 'speculators'}, {}),
  'reduced': ({'layout': 'speculators', 'is_reduced': True}, {}),
  'sliding': (
    {'layout': 'z-lab', 'sizes': SLIDING},
    {'window': 8, 'causal': True},
  ),
  'non_causal': (
    {
      'layout': 'speculators',
      'sizes': SLIDING,
      'sliding_window_non_causal': True,
    },
    {'window': 8},
  ),
}


def load(directory, target, weights, layout='z-lab', **options):
  options = {'layers': LAYERS, 'vocab_size': VOCAB_SIZE, **options}
  cases.write(directory, layout, weights, **options)
  return ss.load(directory, draft_of=target)


@functools.cache
def pair(directory, kind='z-lab'):
  """A target, the weights of a draft, and the draft."""
  target, options = target_of(2), {**KINDS[kind][0]}
  is_reduced = options.pop('is_reduced', False)
  weights = cases.make_weights(WIDTH, 2, VOCAB_SIZE if is_reduced else None)
  weights['norm.weight'] *= 8  # so sure of itself that trees are deep
  return target, weights, load(directory / kind, target, weights, **options)


def oracle_of(target, weights, text, **options):
  table = np.asarray(target.params['embedding'])
  features = features_of(target, text[:-1], LAYERS)
  return cases.draft(weights, table, table, text, features, **options)


def serve(
  target, draft, requests, policy, lengths=(0, LENGTH), is_warm=False, **sizes
):
  drafts = {'rows': (4,), 'lengths': tuple(lengths), **sizes}
  sizes = make_sizes(drafts=drafts)
  engine = Engine(target, draft, sizes=sizes, policy=policy)
  if is_warm:
    engine.programs.compile_all()
  found = record_drafts(engine)
  with profiling.count_compilations() as compilations:
    results = results_of(engine, requests)
  assert not (is_warm and compilations.count)
  assert_empty(engine)
  return [result.token_ids for result in results], found, results


REQUESTS = requests_of(6, max_new_tokens=30, ignore_eos=True)


@functools.cache
def plain():
  return serve(target_of(2), None, REQUESTS, None)[0]


@pytest.mark.parametrize('kind', ['z-lab', 'reduced', 'sliding'])
def test_drafts_are_those_of_the_published_forward(directory, kind):
  target, weights, draft = pair(directory, kind)

  def oracle(text, length):
    return oracle_of(target, weights, text, **KINDS[kind][1])[0][:length]

  check_drafts(target, draft, oracle, (0, LENGTH))


@pytest.mark.parametrize('kernel', [pallas_tpu, pallas_gpu])
def test_kernels_take_blocks_that_see_each_other(kernel):
  """In their interpreters; the second row is padding."""
  generator = np.random.default_rng(0)

  def random(*shape):
    return generator.normal(size=shape).astype(np.float32)

  prefix_lengths = np.int32([17, 0])
  args = (
    random(2, 8, 2, 2, 128),
    random(4, 16, 256),
    random(4, 16, 256),
    np.int32([[3, 1], [0, 2]]),
    prefix_lengths,
    np.int32([8, 0]),
    np.ones((2, 8, 8), bool),
    prefix_lengths[:, None] + np.arange(8, dtype=np.int32)[None],
  )

  @jax.jit
  def both(*args):
    found = kernel.paged_attention(*args, scale=0.1, interpret=True)
    return found, reference.paged_attention(*args, scale=0.1)

  found, expected = both(*args)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_tables_are_those_of_the_target(directory):
  target, _, draft = pair(directory)
  assert draft.params['embedding'] is target.params['embedding']
  assert ModelConfig.from_json(draft.config.to_json()) == draft.config


def best_tree(logits, num_nodes):
  """Tokens, parents and log-probabilities of the most probable paths."""
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  log_probs = np.log(probs / probs.sum(-1, keepdims=True))
  found, waiting = [], []

  def wait(score, parent, depth):
    if depth < len(log_probs):
      for token, more in enumerate(log_probs[depth].tolist()):
        heapq.heappush(waiting, (score - more, parent, depth, token))

  wait(0.0, 0, 0)
  for node in range(1, num_nodes + 1):
    score, parent, depth, token = heapq.heappop(waiting)
    found.append((token, parent, -score))
    wait(score, node, depth + 1)
  return zip(*found, strict=True)


TREES = {'lengths': (0, 8), 'draft_steps': (0, 3)}


def tree_of(draft):
  return TreeDraft(model=draft, prompt_lookup=False)


@pytest.mark.parametrize('kind', KINDS)
def test_trees_are_the_best_of_independent_places(directory, kind):
  """By the logits of the published forward."""
  target, weights, draft = pair(directory, kind)
  tokens, found, _ = serve(
    target, tree_of(draft), REQUESTS[:2], FixedLength(8), **TREES
  )
  assert tokens == plain()[:2]
  ids = np.asarray(draft.params.get('output_token_ids', np.arange(VOCAB_SIZE)))
  for text, drafted, (parents, log_probs) in found[::10]:
    _, logits = oracle_of(target, weights, text, **KINDS[kind][1])
    best, its_parents, scores = best_tree(logits, len(drafted))
    assert drafted == ids[[*best]].tolist()
    assert parents.tolist() == [*its_parents]
    np.testing.assert_allclose(log_probs, scores, atol=1e-4)


GREEDY, DRAWN, TRUNCATED = (
  requests_of(2, max_new_tokens=20, **sampling)
  for sampling in (
    {},
    {'temperature': 1.0},
    {'temperature': 0.7, 'top_k': 20, 'top_p': 0.9},
  )
)
# A row is drawn in each step: greedy rows alone have programs of their own.
SAMPLED = [DRAWN[0], TRUNCATED[0], *GREEDY, DRAWN[1], TRUNCATED[1]]


@pytest.mark.parametrize('makes_trees', [False, True])
def test_sampled_output_is_that_of_plain_decoding(directory, makes_trees):
  target, _, draft = pair(directory, 'z-lab' if makes_trees else 'reduced')
  expected, _, _ = serve(target, None, SAMPLED, None)
  sizes = TREES if makes_trees else {}
  draft = tree_of(draft) if makes_trees else draft
  policy, is_warm = RandomLengths(1), not makes_trees
  tokens, found, _ = serve(
    target, draft, SAMPLED, policy, is_warm=is_warm, **sizes
  )
  assert tokens == expected
  assert len(found) > 20


@pytest.mark.parametrize('temperature', [0.0, 0.05])
def test_right_drafts_are_accepted(tmp_path, temperature):
  """A draft that always proposes what the target is made to write."""
  target = target_of(2)
  weights = cases.make_weights(WIDTH, 2)
  for name in weights:
    if 'o_proj' in name or 'down_proj' in name:
      weights[name] *= 0  # hidden states are those of the mask
  draft = load(tmp_path, target, weights)
  constant = oracle_of(target, weights, TEXT)[0][0]
  requests = requests_of(
    3,
    max_new_tokens=30,
    ignore_eos=True,
    temperature=temperature,
    logit_bias={constant: 100.0},
  )
  tokens, _, results = serve(target, draft, requests, FixedLength(LENGTH))
  assert tokens == [(constant,) * 30] * 3
  for result in results:
    assert result.stats.num_accepted == result.stats.num_drafted > 20


def test_devices_that_share(directory):
  pair(directory)  # writes it
  target = target_of(2, (0, 2))
  devices = jax.devices()[:2]
  draft = ss.load(directory / 'z-lab', draft_of=target, devices=devices)
  tokens, _, _ = serve(target, draft, REQUESTS[:2], FixedLength(LENGTH))
  assert tokens == plain()[:2]


def test_what_cannot_be_drafted_is_refused(directory):
  target, _, draft = pair(directory)
  with pytest.raises(errors.UserError, match='drafts 4; declare lengths of at'):
    serve(target, draft, [], None, range(6))
  with pytest.raises(errors.UserError, match='engine alone'):
    Engine(target, PersistentTrees(model=draft, tree=TREE), sizes=make_sizes())
  with pytest.raises(errors.UserError, match='engine alone'):
    ss.Decoder(target, draft, tree=TREE)
  with pytest.raises(errors.UserError, match='load it with draft_of=target'):
    ss.load(directory / 'z-lab')
  with pytest.raises(errors.UserError, match='is no EAGLE-3 head'):
    ss.save_draft(draft, directory / 'saved', target=target)


BAD_ENTRIES = [
  ({'architectures': ['DFlash2DraftModel']}, "'DFlash2DraftModel' is not supp"),
  ({'speculators_model_type': 'dflash2'}, "type='dflash2' is not supported"),
  ({'sample_from_anchor': True}, 'sample_from_anchor=True .* must be false'),
  ({'final_logit_softcapping': 30.0}, 'softcapping=30.0 is not supported'),
  ({'model_type': 'llama'}, "model_type='llama' .* layers are of qwen3"),
  ({'hidden_size': 64}, 'hidden_size=64 .* of target is 32'),
  ({'num_target_layers': 36}, 'num_target_layers=36 .* target is 2'),
  ({'vocab_size': 300}, 'vocab_size=300 .* target is 262'),
  ({'block_size': None}, 'block_size=None .* must be a number'),
  ({'block_size': 1}, 'num_drafts must be at least 1, got 0'),
  (
    {'dflash_config': {'mask_token_id': 262, 'target_layer_ids': [0]}},
    'one of the 262 tokens',
  ),
  (
    {'dflash_config': {'mask_token_id': 1, 'target_layer_ids': [2]}},
    'has no outputs of layers',
  ),
  (
    {'dflash_config': {'mask_token_id': 1}},
    'target_layer_ids=None .* list them there, as its authors say',
  ),
  ({'quantization_config': {'bits': 4}}, 'quantization_config='),
]


@pytest.mark.parametrize(('changes', 'message'), BAD_ENTRIES)
def test_what_is_not_understood_is_named(tmp_path, changes, message):
  target = target_of(2)
  with pytest.raises(errors.UserError, match=message):
    load(tmp_path, target, cases.make_weights(WIDTH, 2), **changes)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fc.weight': None}, 'tensor fc.weight is missing'),
    ({'layers.0.extra.weight': np.ones(3)}, 'extra.weight is not of a DFlash'),
    ({'norm.weight': np.ones(3)}, 'norm.weight has shape'),
  ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, changes, message):
  weights = {**cases.make_weights(WIDTH, 2), **changes}
  weights = {k: v for k, v in weights.items() if v is not None}
  with pytest.raises(errors.UserError, match=message):
    load(tmp_path, target_of(2), weights, sizes={'hidden_size': WIDTH})
