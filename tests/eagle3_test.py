"""EAGLE-3 heads of others: loaded, compared with an oracle, exact."""

import dataclasses
import functools
import json

import eagle3_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import check_refused
from decoding_cases import assert_same, run
from engine_feature_test import check_drafts
from load_cases import read
from safetensors import numpy as safetensors_numpy
from tree_cases import CONFIG, DEVICES, MIXED, TREE, plain, requests_of

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.config.architecture import Eagle3, RopeScaling
from swiftspec_jax.models import decoder, families

VOCAB_SIZE, WIDTH = CONFIG.vocab_size, CONFIG.embed_dim
TEXT = tuple((np.arange(12) * 31 + 5) % VOCAB_SIZE)
LENGTH = 4


@functools.cache
def target_of(num_layers, devices=(0, 1)):
  config = dataclasses.replace(CONFIG, num_layers=num_layers)
  devices = jax.devices()[slice(*devices)]
  return testing.random_model(config, name='target', devices=devices)


def features_of(target, text, layers):
  every = tuple(range(target.config.num_layers))
  _, features, _ = read(target, text, feature_layers=every)
  by_layer = np.split(np.asarray(features)[0], len(every), axis=1)
  return np.concatenate([by_layer[i] for i in layers], axis=1)


project_features, unembed = (
  jax.jit(f, static_argnames='config')
  for f in (decoder.project_features, decoder.unembed)
)


def chain_of(draft, text, features, length=LENGTH):
  """What our head drafts after a text, and the logits."""
  params, config = draft.params, draft.config
  projected = project_features(params, config, features[None])
  before = np.pad(projected, ((0, 0), (1, 0), (0, 0)))
  outputs = params.get('output_token_ids', np.arange(config.vocab_size))
  outputs = np.asarray(outputs)
  known, found = list(text), []
  for _ in range(length):
    hidden, _, _ = read(draft, known, before)
    logits = np.asarray(unembed(params, config, hidden[:, -1:]))[0, 0]
    found.append(logits)
    known.append(int(outputs[logits.argmax()]))
    before = np.concatenate([before, hidden[:, -1:]], axis=1)
  return known[len(text) :], np.array(found)


def write(directory, weights, layout='sglang', inputs=(1, 3, 4), **switches):
  sizes = {'inputs': inputs, 'vocab_size': VOCAB_SIZE}
  cases.write(directory, layout, weights, **sizes, **switches)


def head_of(
  tmp_path, target, layout, *, inputs=(1, 3, 4), embedding=None, **switches
):
  weights = cases.make_weights(WIDTH, VOCAB_SIZE, len(inputs), **switches)
  stored = weights
  if embedding is not None:
    stored = {**weights, 'embed_tokens.weight': embedding}
  write(tmp_path, stored, layout, inputs, **switches)
  return weights, ss.load(tmp_path, draft_of=target)


SWITCHES = ('norm_before_residual', 'norm_before_fc', 'fc_norm', 'norm_output')


@pytest.mark.parametrize(
  ('layout', 'switch'),
  [
    ('safeailab', None),
    ('sglang', None),
    ('sglang', 'norm_before_residual'),
    ('speculators', None),
    *(('speculators', switch) for switch in SWITCHES),
  ],
)
def test_chains_are_those_of_the_published_forward(tmp_path, layout, switch):
  """Step by step; the layers are those that the layout says."""
  target = target_of(6)
  switches = {switch: True} if switch else {}
  inputs = (2, 3, 3) if layout == 'safeailab' else (1, 3, 4)
  weights, draft = head_of(tmp_path, target, layout, inputs=inputs, **switches)
  layers = tuple(i - 1 for i in inputs)
  assert draft.config.feature_layers == layers
  features = features_of(target, TEXT[:-1], layers)
  tokens, logits = chain_of(draft, TEXT, features)
  oracle = functools.partial(
    cases.draft, weights, np.asarray(target.params['embedding'])
  )
  expected, their_logits = oracle(TEXT, features, LENGTH, **switches)
  assert tokens == expected
  np.testing.assert_allclose(logits, their_logits, atol=2e-4)
  if switch in ('norm_before_residual', 'norm_output'):  # not ignored
    _, without = oracle(TEXT, features, LENGTH)
    assert np.abs(without[-1] - logits[-1]).max() > 0.1


def test_an_embedding_of_its_own(tmp_path):
  target = target_of(6)
  table = np.asarray(target.params['embedding'])[::-1].copy()
  weights, draft = head_of(tmp_path, target, 'speculators', embedding=table)
  features = features_of(target, TEXT[:-1], draft.config.feature_layers)
  tokens, _ = chain_of(draft, TEXT, features)
  assert tokens == cases.draft(weights, table, TEXT, features, LENGTH)[0]


def test_d2t_may_hold_ids(tmp_path):
  """Where t2d says so; without t2d it holds what is added."""
  target = target_of(6)
  weights, draft = head_of(tmp_path, target, 'sglang')
  file = tmp_path / 'model.safetensors'
  ids = cases.output_ids(VOCAB_SIZE)
  safetensors_numpy.save_file({**weights, 'd2t': ids}, file)
  again = ss.load(tmp_path, draft_of=target)
  np.testing.assert_array_equal(again.params['output_token_ids'], ids)
  del weights['t2d']
  safetensors_numpy.save_file(weights, file)
  again = ss.load(tmp_path, draft_of=target)
  for model in (again, draft):
    np.testing.assert_array_equal(model.params['output_token_ids'], ids)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'speculators_model_type': 'dspark'}, "type='dspark' is not supported"),
    ({'model_type': 'gpt_oss'}, "model_type='gpt_oss' is not supported"),
    ({'target_hidden_size': 64}, 'target_hidden_size=64 .* 32 wide'),
    ({'sliding_window': 16}, 'sliding_window=16 is not supported'),
    ({'use_mtp_layernorm': True}, 'use_mtp_layernorm=True .* must be false'),
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config='),
    ({'vocab_size': 1000}, 'vocab_size=1000 .* target is 262'),
    ({'eagle_config': {'eagle_aux_hidden_state_layer_ids': [6]}}, 'no outputs'),
    ({'draft_vocab_size': 90}, 'lm_head.weight has shape'),
    ({'head_dim': 16}, 'self_attn.o_proj.weight has shape'),
  ],
)
def test_what_is_not_understood_is_named(tmp_path, changes, message):
  write(tmp_path, cases.make_weights(WIDTH, VOCAB_SIZE, 3))
  check_refused(tmp_path, message, changes, draft_of=target_of(6))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fc.weight': None}, 'tensor fc.weight is missing'),
    ({'midlayer.extra.weight': np.ones(3)}, 'layers.0.extra.weight is not of'),
    ({'t2d': np.ones(VOCAB_SIZE, bool)}, 'd2t does not name 100 ascending'),
  ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, changes, message):
  weights = {**cases.make_weights(WIDTH, VOCAB_SIZE, 3), **changes}
  write(tmp_path, {k: v for k, v in weights.items() if v is not None})
  check_refused(tmp_path, message, draft_of=target_of(6))
  check_refused(tmp_path, 'load it with draft_of=target')


@functools.cache
def small_pair(directory, target_devices=(0, 1), draft_devices=(0, 1)):
  """A target, and a head that reads both of its layers."""
  target = target_of(2, target_devices)
  weights = cases.make_weights(WIDTH, VOCAB_SIZE, 2)
  write(directory, weights, inputs=(1, 2))
  devices = jax.devices()[slice(*draft_devices)]
  return weights, target, ss.load(directory, draft_of=target, devices=devices)


@pytest.mark.parametrize('mode', DEVICES)
def test_trees_write_what_plain_decoding_writes(directory, mode):
  """Greedy and sampled; the head knows 100 of 262 tokens."""
  _, target, draft = small_pair(directory, *DEVICES[mode])
  tree_decoder = ss.Decoder(target, draft, tree=TREE, batch_size=3)
  results = run(tree_decoder, MIXED)
  assert_same(results, plain(2))
  assert sum(result.stats.num_drafted for result in results) > 100


def test_drafts_of_engines_are_those_of_the_oracle(directory):
  weights, target, draft = small_pair(directory)
  table = np.asarray(target.params['embedding'])

  def oracle(text, length):
    features = features_of(target, text[:-1], (0, 1))
    return cases.draft(weights, table, text, features, length)[0]

  check_drafts(target, draft, oracle)


def test_prompts_of_one_token(directory):
  """Of the first token alone no head knows anything."""
  _, target, draft = small_pair(directory)
  requests = [
    dataclasses.replace(request, token_ids=(i,))
    for i, request in zip((5, 80), MIXED[2::2], strict=True)
  ]
  tree_decoder = ss.Decoder(target, draft, tree=TREE, batch_size=3)
  expected = run(ss.Decoder(target, batch_size=3), requests)
  assert_same(run(tree_decoder, requests), expected)


def test_heads_are_split_and_quantized(directory):
  """Over more devices than it has kv heads, and with int8 matrices."""
  _, target, draft = small_pair(directory)
  features = features_of(target, TEXT[:-1], (0, 1))
  _, logits = chain_of(draft, TEXT, features)
  split = ss.load(directory, draft_of=target, devices=jax.devices()[:3])
  small = ss.load(directory, draft_of=target, weight_dtype='int8')
  requests = requests_of(2, max_new_tokens=20)
  targets = target_of(2, (3, 4))
  tree_decoder = ss.Decoder(targets, split, tree=TREE, batch_size=3)
  expected = run(ss.Decoder(target, batch_size=3), requests)
  assert_same(run(tree_decoder, requests), expected)
  _, rounded = chain_of(small, TEXT, features)
  assert 0 < np.abs(rounded[0] - logits[0]).max() < 0.2


@pytest.mark.parametrize(
  ('family', 'switch', 'has_embedding'),
  [
    ('llama', None, False),
    ('qwen3', 'norm_before_fc', True),
    ('llama', 'fc_norm', True),
  ],
)
def test_heads_are_written_as_they_are_read(
  tmp_path, family, switch, has_embedding
):
  target = target_of(6)
  config = dataclasses.replace(
    CONFIG,
    family=family,
    use_qk_norm=family == 'qwen3',
    num_layers=2,
    tie_embeddings=False,
    output_vocab_size=100,
    feature_layers=(0, 2, 5),
    feature_dim=3 * WIDTH,
    rope_scaling=RopeScaling(
      kind='llama3' if family == 'llama' else 'yarn',
      factor=8.0,
      original_max_context=CONFIG.max_context // 8,
    ),
    eagle3=Eagle3(
      norm_before_residual=True, **({switch: True} if switch else {})
    ),
  )
  head = testing.random_model(config, seed=2, name='head')
  generator = np.random.default_rng(0)
  params = jax.tree.map(  # no two norms are the same
    lambda x: np.asarray(x) + generator.normal(0, 0.1, x.shape).astype(x.dtype),
    head.params,
  )
  head = dataclasses.replace(head, params=params)
  ids = cases.output_ids(VOCAB_SIZE).astype(np.int32)
  head.params['output_token_ids'] = jnp.asarray(ids)
  if not has_embedding:
    head.params['embedding'] = jnp.asarray(target.params['embedding'])
  ss.save_draft(head, tmp_path, target=target)
  stored = safetensors_numpy.load_file(tmp_path / 'model.safetensors')
  assert ('embed_tokens.weight' in stored) == has_embedding
  np.testing.assert_array_equal(np.flatnonzero(stored['t2d']), ids)
  again = ss.load(tmp_path, draft_of=target)
  assert again.config == head.config
  jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


@pytest.mark.parametrize('family', families.FAMILIES)
def test_written_for_targets_of_all_families(tmp_path, directory, family):
  _, target, draft = small_pair(directory)
  config = dataclasses.replace(target.config, family=family)
  target = dataclasses.replace(target, config=config)
  ss.save_draft(draft, tmp_path, target=target)
  values = json.loads((tmp_path / 'config.json').read_text())
  (name,) = values['speculators_config']['verifier']['architectures']
  assert name.endswith('ForCausalLM')


def test_what_cannot_be_written_is_refused(tmp_path, directory):
  _, target, draft = small_pair(directory)
  split = ss.load(directory, draft_of=target, devices=jax.devices()[:2])
  small = ss.load(directory, draft_of=target, weight_dtype='int8')
  other = dataclasses.replace(CONFIG, vocab_size=270)
  for head, its_target, message in [
    (target, target, 'target is no EAGLE-3 head'),
    (split, target, 'on 2 devices'),
    (small, target, 'its weights are int8'),
    (draft, testing.random_model(other), '262 tokens and random has 270'),
  ]:
    with pytest.raises(errors.UserError, match=message):
      ss.save_draft(head, tmp_path / 'no', target=its_target)
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UserError, match='cannot write'):
    ss.save_draft(draft, tmp_path / 'file', target=target)
