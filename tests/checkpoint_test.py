"""Every way to load a model, and what is said of broken checkpoints."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import check_refused
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.testing.byte_tokenizer import EOS


def assert_same_params(one, other, **tolerances):
  paths = jax.tree_util.tree_leaves_with_path(one.params)
  for (path, a), b in zip(paths, jax.tree.leaves(other.params), strict=True):
    np.testing.assert_allclose(
      np.asarray(a, np.float32),
      np.asarray(b, np.float32),
      err_msg=jax.tree_util.keystr(path),
      **(tolerances or {'rtol': 0}),
    )


@pytest.mark.parametrize('family', ['llama', 'qwen3_moe'])
def test_weights_in_several_files(family, tmp_path):
  testing.write_tiny_checkpoint(tmp_path / 'one', family)
  testing.write_tiny_checkpoint(tmp_path / 'three', family, num_files=3)

  assert_same_params(ss.load(tmp_path / 'one'), ss.load(tmp_path / 'three'))


def test_an_old_index_beside_a_single_file(tmp_path):
  """The file is loaded, as in transformers, and not the older shards."""
  testing.write_tiny_checkpoint(tmp_path)
  before = ss.load(tmp_path)
  (tmp_path / INDEX).write_text(index_of('model-00001-of-00001.safetensors'))
  assert_same_params(ss.load(tmp_path), before)


def test_a_checkpoint_of_a_bare_decoder(tmp_path):
  testing.write_tiny_checkpoint(tmp_path, 'qwen3')
  before = ss.load(tmp_path)
  file = tmp_path / 'model.safetensors'
  weights = safetensors_numpy.load_file(file)
  bare = {name.removeprefix('model.'): weights[name] for name in weights}
  safetensors_numpy.save_file(bare, file)

  assert_same_params(ss.load(tmp_path), before)


@pytest.mark.parametrize(
  ('stored', 'dtype'),
  [
    ('float32', jnp.bfloat16),
    ('bfloat16', jnp.float32),
    ('float16', jnp.bfloat16),
  ],
)
def test_dtypes(stored, dtype, tmp_path):
  testing.write_tiny_checkpoint(tmp_path, 'llama', torch_dtype=stored)

  model = ss.load(tmp_path, dtype=dtype)

  weights = safetensors_numpy.load_file(tmp_path / 'model.safetensors')
  embedding = weights['model.embed_tokens.weight']
  assert embedding.dtype == jnp.dtype(stored)
  np.testing.assert_array_equal(
    model.params['embedding'], embedding.astype(dtype)
  )
  assert model.params['final_norm'].dtype == jnp.float32
  assert model.dtype == dtype


@pytest.mark.parametrize(
  ('family', 'dtype'),
  [
    ('qwen2', jnp.bfloat16),
    ('llama3', jnp.float32),
    ('gemma3_text', jnp.float32),
    ('qwen3_moe', jnp.float32),
    ('gemma4_text', jnp.float32),
  ],
)
def test_saved_models_come_back(family, dtype, tmp_path):
  testing.write_tiny_checkpoint(tmp_path / 'source', family)
  model = ss.load(tmp_path / 'source', dtype=dtype)
  ss.save(model, tmp_path / 'new' / 'saved')

  loaded = ss.load(tmp_path / 'new' / 'saved', dtype=dtype)
  on_two = ss.load(tmp_path / 'new' / 'saved', devices=jax.devices()[:2])

  assert_same_params(loaded, model)
  assert loaded.config == model.config
  assert on_two.config == dataclasses.replace(model.config, num_shards=2)
  assert loaded.tokenizer.get_vocab() == model.tokenizer.get_vocab()
  assert loaded.tokenizer.chat_template == model.tokenizer.chat_template
  assert os.listdir(tmp_path / 'new') == ['saved']


CRASH = """
import dataclasses, os, sys
import swiftspec_jax as ss

class Crash:
  def save_pretrained(self, directory):
    os._exit(9)

model = ss.load(sys.argv[1])
ss.save(dataclasses.replace(model, tokenizer=Crash()), sys.argv[2])
"""


def test_a_crash_leaves_nothing_to_load(tmp_path):
  testing.write_tiny_checkpoint(tmp_path / 'source')
  target = tmp_path / 'saved'
  program = [sys.executable, '-c', CRASH, tmp_path / 'source', target]

  assert subprocess.run(program, check=False).returncode == 9

  assert not target.exists()
  ss.save(ss.load(tmp_path / 'source'), target)
  assert ss.load(target).config == ss.load(tmp_path / 'source').config


def test_saving_needs_a_new_directory_and_one_device(tmp_path):
  testing.write_tiny_checkpoint(tmp_path / 'source')
  model = ss.load(tmp_path / 'source')
  padded = ss.load(tmp_path / 'source', devices=jax.devices()[:3])
  (tmp_path / 'file').touch()

  with pytest.raises(ss.UserError, match='source exists already'):
    ss.save(model, tmp_path / 'source')
  with pytest.raises(ss.UserError, match='padded for 3 devices'):
    ss.save(padded, tmp_path / 'saved')
  with pytest.raises(ss.UserError, match=r'cannot write .*file/saved'):
    ss.save(model, tmp_path / 'file' / 'saved')


HUB = """
import sys
import swiftspec_jax as ss
for repo_id in sys.argv[1:]:
  try:
    print(ss.load(repo_id).config.embed_dim)
  except ss.UserError as error:
    print('UserError:', error)
"""


def test_hub_ids_without_network(tmp_path):
  repo = tmp_path / 'hub' / 'models--someone--tiny'
  testing.write_tiny_checkpoint(repo / 'snapshots' / 'abc123')
  (repo / 'refs').mkdir()
  (repo / 'refs' / 'main').write_text('abc123')

  done = subprocess.run(
    [sys.executable, '-c', HUB, 'someone/tiny', 'someone/other'],
    env={**os.environ, 'HF_HOME': str(tmp_path), 'HF_HUB_OFFLINE': '1'},
    capture_output=True,
    text=True,
    check=True,
  )

  assert done.stdout.startswith("32\nUserError: no model 'someone")


def test_a_draft_must_have_the_vocabulary_of_its_target(tmp_path):
  testing.write_tiny_checkpoint(tmp_path / 'target')
  testing.write_tiny_checkpoint(tmp_path / 'draft', num_hidden_layers=1)
  testing.write_tiny_checkpoint(tmp_path / 'letters')
  letters = testing.table_model(np.eye(3)).tokenizer
  letters.save_pretrained(tmp_path / 'letters')
  target = ss.load(tmp_path / 'target')

  assert ss.load(tmp_path / 'draft', draft_of=target).config.num_layers == 1
  with pytest.raises(
    ss.UserError, match=r"target \(272.*letters \(3 .* token 0 is .* and 'a'"
  ):
    ss.load(tmp_path / 'letters', draft_of=target)


@pytest.mark.parametrize(
  ('in_config', 'in_generation_config', 'expected'),
  [
    (2, None, (2, EOS)),
    ([1, 2], None, (1, 2, EOS)),
    (None, None, (EOS,)),
    # What is left over from another vocabulary would end texts anywhere.
    (2, {'eos_token_id': [3, 4]}, (3, 4, EOS)),
    ([2, 259], {'eos_token_id': 0}, (0, 259, EOS)),
    (2, {'temperature': 0.6}, (2, EOS)),
  ],
)
def test_end_of_sequence_tokens(
  in_config, in_generation_config, expected, tmp_path
):
  testing.write_tiny_checkpoint(tmp_path, 'llama', eos_token_id=in_config)
  if in_generation_config is not None:
    path = tmp_path / 'generation_config.json'
    path.write_text(json.dumps(in_generation_config))

  assert ss.load(tmp_path).config.eos_token_ids == expected


@pytest.mark.parametrize(
  ('family', 'changes', 'expected'),
  [
    ('llama', {'head_dim': None}, {'head_dim': 8}),
    ('llama', {'sliding_window': 4}, {'sliding_window': None}),
    ('mistral', {'sliding_window': None}, {'sliding_window': None}),
    ('mistral', {}, {'sliding_window': 16, 'sliding_layers': ()}),
    ('qwen2', {'sliding_window': 4}, {'sliding_window': None}),
    (
      'qwen3',
      {'sliding_window': 4, 'use_sliding_window': True, 'max_window_layers': 1},
      {'sliding_window': 4, 'sliding_layers': (False, True)},
    ),
    (
      'qwen3',
      {'sliding_window': 4, 'use_sliding_window': True},
      {'sliding_window': None, 'sliding_layers': ()},
    ),
    (
      'gemma3_text',
      {'num_hidden_layers': 7, 'layer_types': None},
      {'sliding_layers': (True,) * 5 + (False, True)},
    ),
  ],
)
def test_options_of_configurations(family, changes, expected, tmp_path):
  testing.write_tiny_checkpoint(tmp_path, family, **changes)

  config = ss.load(tmp_path).config

  for field, value in expected.items():
    assert getattr(config, field) == value


@pytest.mark.parametrize(
  ('family', 'changes', 'message'),
  [
    ('llama', {'model_type': 'mamba'}, "unknown architecture 'mamba'"),
    ('llama', {'model_type': None}, 'unknown architecture None'),
    ('llama', {'rope_scaling': {'rope_type': 'llama3'}}, 'low_freq_factor'),
    ('llama', {'hidden_act': 'relu'}, "unknown activation 'relu'"),
    ('llama', {'attention_bias': True}, 'attention_bias=True'),
    ('llama', {'mlp_bias': True}, 'mlp_bias=True'),
    ('qwen3', {'attention_bias': True}, 'attention_bias=True'),
    ('qwen3', {'head_dim': None}, "'head_dim' expected int, got NoneType"),
    (
      'gemma3_text',
      {'final_logit_softcapping': 30.0},
      'final_logit_softcapping=30.0',
    ),
    (
      'llama',
      {'quantization_config': {'quant_method': 'bitsandbytes'}},
      'quantization_config=.*bitsandbytes',
    ),
    ('llama', {'num_hidden_layers': 'two'}, "'num_hidden_layers' .*'two'"),
    ('llama', {'num_key_value_heads': 3}, 'num_kv_heads=3'),
    ('llama', {'hidden_size': 40}, r'\(32,\).*\(40,\)'),
    ('llama', {'intermediate_size': 50}, r'\(48, 32\).*\(50, 32\)'),
    ('llama', {'vocab_size': 280}, r'\(272, 32\).*\(280, 32\)'),
    ('llama', {'head_dim': 24}, r'\(32, 32\).*\(32, 96\)'),
    ('llama', {'num_hidden_layers': 3}, r'model\.layers\.2\..* is missing'),
    ('qwen2', {'tie_word_embeddings': False}, r'lm_head\.weight is missing'),
  ],
)
def test_unusable_configurations(family, changes, message, tmp_path):
  testing.write_tiny_checkpoint(tmp_path, family)
  check_refused(tmp_path, message, changes)


YARN = {'rope_type': 'yarn', 'factor': 4.0}
OF_YARN = {'original_max_position_embeddings': 1024}


@pytest.mark.parametrize(
  ('family', 'entries', 'context'),
  [
    ('llama', YARN, 4096),
    ('qwen3', {**YARN, 'beta_fast': 16.0, 'truncate': False}, 4096),
    ('mistral', {'type': 'linear', 'factor': 2.5}, 2560),
    ('llama', {**YARN, 'original_max_position_embeddings': 512}, 2048),
  ],
)
def test_rope_scaling_is_that_of_a_declared_one(
  family, entries, context, tmp_path
):
  """Same as a checkpoint whose config.json says so."""
  testing.write_tiny_checkpoint(tmp_path / 'plain', family)
  testing.write_tiny_checkpoint(
    tmp_path / 'declared',
    family,
    max_position_embeddings=context,
    rope_scaling={**OF_YARN, **entries},
  )
  model = ss.load(tmp_path / 'plain', rope_scaling=entries)
  declared = ss.load(tmp_path / 'declared')
  assert model.config == declared.config
  assert model.config.max_context == context
  assert_same_params(model, declared)
  ss.save(model, tmp_path / 'saved')
  assert ss.load(tmp_path / 'saved').config == model.config


@pytest.mark.parametrize(
  ('family', 'entries', 'message'),
  [
    ('llama', {'factor': 4.0}, "rope_type='default' cannot be given to a mod"),
    ('llama', {**YARN, 'rope_type': 'llama3'}, "rope_type='llama3' cannot be"),
    ('llama', {**YARN, 'factor': 1.0}, 'factor=1.0 must be more than 1'),
    ('llama', {**YARN, 'factor': '4'}, "factor='4' must be a positive number"),
    ('llama', {'rope_type': 'linear'}, "linear needs the entry 'factor'"),
    ('llama', {'rope_type': 'yarn'}, 'factor=None must be more than 1'),
    ('llama', {**YARN, 'fator': 4}, "yarn has no entry 'fator'; it has factor"),
    ('llama3', YARN, "has the scaling 'llama3' already, by a factor of 8"),
    ('llama', ['yarn', 4.0], 'must be an object with rope_type'),
  ],
)
def test_rope_scaling_that_makes_no_sense(family, entries, message, tmp_path):
  testing.write_tiny_checkpoint(tmp_path, family)
  check_refused(tmp_path, message, rope_scaling=entries)


def test_a_draft_is_stretched_as_its_target(tmp_path):
  """One whose context is that of its target needs the original one."""
  testing.write_tiny_checkpoint(tmp_path / 'short')
  testing.write_tiny_checkpoint(tmp_path / 'long', max_position_embeddings=4096)
  target = ss.load(tmp_path / 'short', rope_scaling=YARN)
  draft = ss.load(tmp_path / 'short', draft_of=target, rope_scaling=YARN)
  assert draft.config == target.config
  with pytest.raises(ss.UserError, match='takes 4096 tokens already, as'):
    ss.load(tmp_path / 'long', draft_of=target, rope_scaling=YARN)
  draft = ss.load(
    tmp_path / 'long', draft_of=target, rope_scaling={**YARN, **OF_YARN}
  )
  assert draft.config == target.config


def damage(directory, pattern, what):
  """Removes files, cuts them to a size or writes a text in their place."""
  for path in [*directory.glob(pattern)] or [directory / pattern]:
    if what is None:
      shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif isinstance(what, str):
      path.write_text(what)
    else:
      with path.open('r+b') as file:
        file.truncate(what)


INDEX = 'model.safetensors.index.json'


def index_of(*files):
  return json.dumps({'weight_map': dict(enumerate(files))})


@pytest.mark.parametrize(
  ('files', 'what', 'message'),
  [
    ('config.json', None, r'config\.json is missing'),
    ('config.json', 30, r'config\.json: not valid JSON'),
    ('config.json', '[1]', r'config\.json: must be a JSON object, got \[1\]'),
    ('model.safetensors', None, r'model\.safetensors is missing'),
    (
      'model.safetensors',
      20_000,
      r'model\.safetensors is missing or cut short',
    ),
    (
      INDEX,
      index_of('model.safetensors', 'gone.safetensors'),
      r'gone\.safetensors is missing',
    ),
    (INDEX, '{}', r'index\.json has no weight_map'),
    ('tokenizer*.json', None, 'no usable tokenizer'),
    ('tokenizer.json', 300, 'no usable tokenizer'),
  ],
)
def test_broken_directories(files, what, message, tmp_path):
  testing.write_tiny_checkpoint(tmp_path)
  damage(tmp_path, files, what)

  with pytest.raises(ss.UserError, match=message):
    ss.load(tmp_path)


@pytest.mark.parametrize(
  ('files', 'what', 'message'),
  [
    ('params', None, 'params is not a complete checkpoint'),
    ('model_config.json', 40, r'model_config\.json is not usable'),
    ('model_config.json', '{"new": 1}', r'model_config\.json is not usable'),
  ],
)
def test_broken_saves(files, what, message, tmp_path):
  testing.write_tiny_checkpoint(tmp_path / 'source')
  ss.save(ss.load(tmp_path / 'source'), tmp_path / 'saved')
  damage(tmp_path / 'saved', files, what)

  with pytest.raises(ss.UserError, match=message):
    ss.load(tmp_path / 'saved')


def test_paths_that_are_no_model(tmp_path):
  (tmp_path / 'notes.txt').write_text('hello')

  with pytest.raises(ss.UserError, match=r'notes\.txt is neither'):
    ss.load(tmp_path / 'notes.txt')
  with pytest.raises(ss.UserError, match=r"no model '.*/nowhere'"):
    ss.load(tmp_path / 'nowhere')
