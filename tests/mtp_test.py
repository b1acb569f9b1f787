"""The layer for multi-token prediction in MiMo's own checkpoint.

The oracle is plain NumPy; `test_equals_transformers_live` compares it with the
code that transformers has for such layers.
"""

import functools
import json

import checkpoint_cases
import jax
import numpy as np
import pytest
from eagle3_cases import attend, gated, rms_norm, rotate
from eagle3_test import chain_of, features_of
from engine_feature_test import check_drafts
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss
from swiftspec_jax import testing

WIDTH, FFW, HEAD_DIM, NUM_LAYERS, LENGTH = 32, 48, 8, 2, 4
START = 'model.mtp_layers.0.'
TEXT = tuple((np.arange(12) * 31 + 5) % 262)


def write(directory, **changes):
  """Writes a target with its layer; returns all tensors."""
  values = {
    'model_type': 'mimo',
    'attention_bias': True,
    'num_nextn_predict_layers': 1,
    'auto_map': {'AutoConfig': 'configuration_mimo.MiMoConfig'},
    'max_position_embeddings': 256,
    'rope_theta': 500.0,
    **changes,
  }
  testing.write_tiny_checkpoint(directory, 'qwen2', **values)
  file = directory / 'model.safetensors'
  weights = safetensors_numpy.load_file(file)
  draw = checkpoint_cases.Random()
  random = draw.matrix
  linear = {
    'input_proj.weight': random(WIDTH, 2 * WIDTH),
    'self_attn.o_proj.weight': random(WIDTH, WIDTH),
    'mlp.gate_proj.weight': random(FFW, WIDTH),
    'mlp.up_proj.weight': random(FFW, WIDTH),
    'mlp.down_proj.weight': random(WIDTH, FFW),
  }
  for name, size in (('q', WIDTH), ('k', WIDTH // 2), ('v', WIDTH // 2)):
    linear[f'self_attn.{name}_proj.weight'] = random(size, WIDTH)
    linear[f'self_attn.{name}_proj.bias'] = random(size)
  names = 'token', 'hidden', 'input', 'post_attention', 'final'
  norms = {f'{name}_layernorm.weight': draw.norm(WIDTH) for name in names}
  for name, array in {**linear, **norms}.items():
    weights[START + name] = array
  safetensors_numpy.save_file(weights, file)
  return weights


def forward(weights, tokens, before):
  """Reads pairs of a token and what stands before it [T, D].

  Returns:
    What it gives [T, D], and logits [T, V].
  """

  def get(name):
    return weights[START + name].astype(np.float64)

  def norm(x, name):
    return rms_norm(x, get(f'{name}_layernorm.weight'))

  embeddings = weights['model.embed_tokens.weight'][list(tokens)]
  pairs = [norm(before, 'hidden'), norm(embeddings.astype(float), 'token')]
  x = np.concatenate(pairs, axis=1) @ get('input_proj.weight').T
  size, normed = len(x), norm(x, 'input')
  queries, keys, values = (
    (
      normed @ get(f'self_attn.{name}_proj.weight').T
      + get(f'self_attn.{name}_proj.bias')
    ).reshape(size, -1, HEAD_DIM)
    for name in 'qkv'
  )
  queries, keys = (rotate(x, np.arange(size)) for x in (queries, keys))
  attended = attend(queries, keys, values, np.tri(size, dtype=bool))
  x = x + attended @ get('self_attn.o_proj.weight').T
  normed = norm(x, 'post_attention')
  names = (f'mlp.{name}_proj.weight' for name in ('gate', 'up', 'down'))
  out = norm(x + gated(normed, *map(get, names)), 'final')
  return out, out @ weights['lm_head.weight'].T


def oracle(weights, text, features, length):
  """A chain after a text, and the logits of its tokens.

  Args:
    weights: of `write`.
    text: tokens.
    features: [len(text) - 1, D] of the target's last layer.
    length: of the chain.
  """
  before = rms_norm(features.astype(float), weights['model.norm.weight'])
  known, found = list(text), []
  for _ in range(length):
    out, logits = forward(weights, known[1:], before)
    found.append(logits[-1])
    known.append(int(logits[-1].argmax()))
    before = np.concatenate([before, out[-1:]])
  return known[len(text) :], np.array(found)


@pytest.fixture(scope='module')
def weights(directory):
  return write(directory, tie_word_embeddings=False)


@pytest.fixture(scope='module')
def pair_of(directory, weights):
  """Loads the target, and its layer from the same checkpoint."""

  @functools.cache
  def load(target_devices=(0, 1), draft_devices=(0, 1)):
    devices = jax.devices()
    target = ss.load(directory, devices=devices[slice(*target_devices)])
    draft = ss.load(
      directory, draft_of=target, devices=devices[slice(*draft_devices)]
    )
    return target, draft

  return load


def test_chains_are_those_of_the_oracle(weights, pair_of):
  target, draft = pair_of()
  assert draft.config.feature_layers == (NUM_LAYERS - 1,)
  features = features_of(target, TEXT[:-1], (NUM_LAYERS - 1,))
  tokens, logits = chain_of(draft, TEXT, features)
  expected, their_logits = oracle(weights, TEXT, features, LENGTH)
  assert tokens == expected
  np.testing.assert_allclose(logits, their_logits, atol=2e-4)


def test_the_target_is_one_of_qwen_2(tmp_path, pair_of):
  """MiMo without its layer, by another name."""
  values = {'max_position_embeddings': 256, 'rope_theta': 500.0}
  testing.write_tiny_checkpoint(
    tmp_path, 'qwen2', tie_word_embeddings=False, **values
  )
  same, target = ss.load(tmp_path), pair_of()[0]
  jax.tree.map(np.testing.assert_array_equal, same.params, target.params)


def test_drafts_of_engines_are_those_of_the_oracle(weights, pair_of):
  target, draft = pair_of()

  def drafted(text, length):
    features = features_of(target, text[:-1], (NUM_LAYERS - 1,))
    return oracle(weights, text, features, length)[0]

  check_drafts(target, draft, drafted)


def test_a_layer_is_quantized(directory, pair_of):
  target, draft = pair_of()
  features = features_of(target, TEXT[:-1], (NUM_LAYERS - 1,))
  _, logits = chain_of(draft, TEXT, features)
  small = ss.load(directory, draft_of=target, weight_dtype='int8')
  _, rounded = chain_of(small, TEXT, features)
  assert 0 < np.abs(rounded[0] - logits[0]).max() < 0.3


def test_tied_tables_are_the_targets(tmp_path):
  weights = write(tmp_path, tie_word_embeddings=True)
  weights['lm_head.weight'] = weights['model.embed_tokens.weight']
  target = ss.load(tmp_path)
  features = features_of(target, TEXT[:-1], (NUM_LAYERS - 1,))
  tokens, _ = chain_of(ss.load(tmp_path, draft_of=target), TEXT, features)
  assert tokens == oracle(weights, TEXT, features, LENGTH)[0]


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_nextn_predict_layers': 3}, 'predict_layers=3 is not supported'),
    ({'num_hidden_layers': 1}, 'has num_layers=1, and .* 2'),
    ({'use_mrope': True}, 'use_mrope=True is not supported for mimo'),
    ({'attention_bias': False}, 'attention_bias=False is not supported'),
    ({'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config'),
  ],
)
def test_what_is_not_understood_is_named(tmp_path, pair_of, changes, message):
  target, _ = pair_of()
  write(tmp_path)
  checkpoint_cases.check_refused(tmp_path, message, changes, draft_of=target)


@pytest.mark.parametrize(
  ('name', 'array', 'message'),
  [
    ('input_proj.weight', None, r'mtp_layers.0.input_proj.weight is missing'),
    ('extra.weight', np.ones(3), r'mtp_layers.0.extra.weight is not of'),
    ('input_proj.weight', np.ones((32, 32)), r'input_proj.weight has shape'),
  ],
)
def test_weights_that_do_not_fit_are_named(
  tmp_path, pair_of, name, array, message
):
  target, _ = pair_of()
  tensors = {**write(tmp_path), START + name: array}
  if array is None:
    del tensors[START + name]
  safetensors_numpy.save_file(tensors, tmp_path / 'model.safetensors')
  checkpoint_cases.check_refused(tmp_path, message, draft_of=target)


@pytest.mark.peers
def test_equals_transformers_live(tmp_path):
  """The layer as MtpModel of transformers makes it over a Qwen 2."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  modeling_layers = pytest.importorskip('transformers.modeling_layers')
  weights = write(tmp_path, tie_word_embeddings=False)
  target = ss.load(tmp_path)
  draft = ss.load(tmp_path, draft_of=target)
  values = json.loads((tmp_path / 'config.json').read_text())
  values |= {'model_type': 'qwen2', 'num_mtp_layers': 1}
  values |= {'mtp_layer_types': ['full_attention']}
  config = transformers.AutoConfig.for_model(
    **values, mtp_hidden_states_first=True, attn_implementation='eager'
  )
  peer = transformers.AutoModelForCausalLM.from_config(config).eval()
  layer = modeling_layers.MtpModel(peer, 1).eval()
  own = {name: torch.tensor(array) for name, array in weights.items()}
  names = {
    'input_proj': 'eh_proj',
    'token_layernorm': 'enorm',
    'hidden_layernorm': 'hnorm',
    'final_layernorm': 'post_norm',
  }
  theirs = {}
  for name in [name for name in own if name.startswith(START)]:
    part, _, rest = name.removeprefix(START).partition('.')
    part = names.get(part, f'mtp_block.{part}')
    theirs[f'layers.0.{part}.{rest}'] = own.pop(name)
  peer.load_state_dict(own)
  missing, unexpected = layer.load_state_dict(theirs, strict=False)
  assert not unexpected
  assert not [name for name in missing if name.startswith('layers.')]
  text = torch.tensor([TEXT]).long()
  with torch.no_grad():
    features = peer.model(text).last_hidden_state[:, :-1]
    out = layer.forward_layer(
      0,
      features,
      position_ids=torch.arange(1, len(TEXT))[None],
      mtp_cache=None,
      input_ids=text[:, 1:],
    )
    logits = peer.lm_head(out)[0, -1].numpy()
  ours = features_of(target, TEXT[:-1], (NUM_LAYERS - 1,))
  _, found = chain_of(draft, TEXT, ours, length=1)
  np.testing.assert_allclose(found[0], logits, atol=1e-4)
