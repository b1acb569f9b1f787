"""Gemma 4: heads of two sizes, shared keys and values, inputs of layers.

`models_test.py` has what all families are tested for.
"""

import dataclasses

import jax
import model_cases
import models_test
import numpy as np
import pytest
import transformers
from checkpoint_cases import add_tower, check_refused
from decoding_cases import assert_same, requests_of, run
from engine_cases import make_engine, results_of

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.checkpoint import hf
from swiftspec_jax.config.architecture import Gemma4, RopeScaling
from swiftspec_jax.distillation.student import StudentConfig
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.models import families
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.policies.fixed_length import FixedLength

# What the config.json of the 31b has other than the defaults.
PUBLISHED = {
  'model_type': 'gemma4',
  'eos_token_id': [1, 106],
  'text_config': {
    'model_type': 'gemma4_text',
    'hidden_size': 5376,
    'intermediate_size': 21_504,
    'num_hidden_layers': 60,
    'num_attention_heads': 32,
    'num_key_value_heads': 16,
    'num_global_key_value_heads': 4,
    'head_dim': 256,
    'global_head_dim': 512,
    'attention_k_eq_v': True,
    'sliding_window': 1024,
    'final_logit_softcapping': 30.0,
    'hidden_size_per_layer_input': 0,
    'use_bidirectional_attention': 'vision',
    'max_position_embeddings': 262_144,
  },
}
SHARED = 'gemma4_layer_inputs'
LINEAR = {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 1e4}
KINDS = ['sliding_attention', 'full_attention']


def load_few(name, directory, layer_types):
  """A model with a layer for each of these types."""
  _, changes = model_cases.CASES[name]
  layers = {'num_hidden_layers': len(layer_types), 'layer_types': layer_types}
  testing.write_tiny_checkpoint(
    directory, 'gemma4_text', **{**changes, **layers}
  )
  return ss.load(directory)


def test_the_published_configuration(tmp_path):
  config = hf.config_of(tmp_path, PUBLISHED)
  assert config.eos_token_ids == (1, 106)
  assert config.sliding_layers == (*[True] * 5, False) * 10
  assert config.gemma4 == Gemma4(
    global_kv_heads=4, global_head_dim=512, num_kv_layers=60, shares_values=True
  )
  scaling = RopeScaling(kind='proportional', factor=1.0, rotated_share=0.25)
  assert (config.rope_theta, config.rope_scaling) == (1e6, scaling)
  assert (config.local_rope_theta, config.query_scale) == (1e4, 1.0)
  assert config.logit_cap == 30
  assert config.kv_heads == (*[(16, 256)] * 5, (4, 512)) * 10
  specs = jax.tree.leaves(params_lib.param_specs(config))
  num_weights = sum(np.prod(spec.shape, dtype=np.int64) for spec in specs)
  assert 30.6e9 < num_weights < 30.8e9


def test_older_releases_of_transformers_have_the_published_names(tmp_path):
  testing.write_tiny_checkpoint(tmp_path, 'gemma4_text')
  values = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
  config = families.config_from_hf(values)
  del values['per_layer_config']
  values |= {'global_head_dim': 24, 'num_global_key_value_heads': 1}
  assert families.config_from_hf(values) == config


def test_output_with_drafts_is_that_of_plain_decoding(tmp_path):
  """In trees of a draft like it that lies elsewhere."""
  target = load_few('gemma4_text', tmp_path, KINDS)
  requests = requests_of(2, longest_prompt=40, max_new_tokens=24)
  tree = ss.TreeConfig(
    num_nodes=4, width=2, num_draft_steps=2, capacity=32, num_cache_rows=14
  )
  elsewhere = ss.load(tmp_path, devices=jax.devices()[1:2])
  got = run(ss.Decoder(target, elsewhere, tree=tree), requests)
  assert_same(got, run(ss.Decoder(target), requests))
  assert sum(result.stats.num_accepted for result in got) > 20


def test_pages_hold_heads_of_two_sizes(tmp_path):
  """On two devices; the target grows trees for itself."""
  alone = load_few(SHARED, tmp_path, 2 * KINDS)
  model = ss.load(tmp_path, devices=jax.devices()[:2])
  requests = requests_of(4, longest_prompt=40, max_new_tokens=24)
  draft = TreeDraft(model=model, width=3, branching=2)
  engine = make_engine(draft, FixedLength(3), target=model)
  wanted = run(ss.Decoder(alone, batch_size=4), requests)
  assert_same(results_of(engine, requests), wanted)


def test_the_decoder_beside_towers(tmp_path):
  text = models_test.load_case(SHARED, tmp_path)
  add_tower(
    tmp_path,
    lambda name: name.replace('model.', 'model.language_model.'),
    'model.vision_tower.x',
    model_type='gemma4',
  )
  both = ss.load(tmp_path)
  # The end of a text is that of the outer configuration.
  eos = text.config.eos_token_ids
  assert dataclasses.replace(both.config, eos_token_ids=eos) == text.config
  jax.tree.map(np.testing.assert_array_equal, both.params, text.params)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    ({'use_bidirectional_attention': 'all'}, "attention='all' is not supp"),
    (
      {'hidden_size_per_layer_input': 8, 'vocab_size_per_layer_input': 99},
      'vocab_size_per_layer_input=99 is not supported .*vocab_size=272',
    ),
    (
      {'per_layer_config': {'1': {'head_dim': 8}, '2': {'head_dim': 24}}},
      'per_layer_config=.* have heads of one size',
    ),
    (
      {'rope_parameters': {KINDS[0]: LINEAR, KINDS[1]: {'rope_theta': 1e6}}},
      'rope_parameters=.*linear.* sliding_attention has the rope_type default',
    ),
    (
      {'rope_parameters': {KINDS[0]: {'rope_theta': 1e4}, KINDS[1]: {}}},
      'rope_parameters=.* lacks rope_theta',
    ),
    ({'num_kv_shared_layers': 2}, 'num_kv_shared_layers=2 is not supported'),
    ({'num_global_key_value_heads': 3}, 'num_heads must be a multiple'),
  ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
  testing.write_tiny_checkpoint(tmp_path, 'gemma4_text')
  check_refused(tmp_path, message, changes)


def test_layers_with_inputs_are_no_draft(tmp_path):
  target = models_test.load_case(SHARED, tmp_path)
  student = StudentConfig(init_layers=(0,))
  with pytest.raises(errors.UserError, match='layers get 8 inputs of each'):
    student.model_config(target.config)
