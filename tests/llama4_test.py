"""Llama 4 as it is published.

`models_test.py` has what all families are tested for.
"""

import jax
import models_test
import numpy as np
import packed_int4_cases
import pytest
from checkpoint_cases import add_tower, check_refused

import swiftspec_jax as ss
from swiftspec_jax import testing


def write_with_tower(directory, **changes):
  """Writes what Llama4ForConditionalGeneration is published as."""
  testing.write_tiny_checkpoint(directory, 'llama4')
  add_tower(
    directory,
    'language_model.{}'.format,
    'vision_model.class_embedding',
    model_type='llama4',
    vision_config={'model_type': 'llama4_vision_model'},
    **changes,
  )


def test_the_decoder_beside_a_vision_tower(tmp_path):
  testing.write_tiny_checkpoint(tmp_path / 'text', 'llama4')
  write_with_tower(tmp_path / 'both', eos_token_id=[7, 8])
  text, both = ss.load(tmp_path / 'text'), ss.load(tmp_path / 'both')
  assert both.config.eos_token_ids == (7, 8, 257)
  jax.tree.map(np.testing.assert_array_equal, both.params, text.params)
  ss.save(both, tmp_path / 'saved')
  assert ss.load(tmp_path / 'saved').config == both.config


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    (
      {'layer_types': ['sliding_attention', *['full_attention'] * 2]},
      "layer_types with 'sliding_attention' is not supported",
    ),
    ({'num_local_experts': 7}, r'gate_up_proj has shape \(6, 32, 40\)'),
  ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
  testing.write_tiny_checkpoint(tmp_path, 'llama4')
  check_refused(tmp_path, message, changes)


def test_int4_of_all_matrices(tmp_path):
  """As llm-compressor packs them, on two devices: experts are no stack then."""
  kind, sizes = packed_int4_cases.COMPRESSED, {'intermediate_size': 24}
  packed, plain = packed_int4_cases.write(
    tmp_path, kind, 'llama4', group_size=8, **sizes
  )
  model = ss.load(packed, devices=jax.devices()[:2])
  assert model.config.weight_dtype == 'int4'
  want = models_test.chain(ss.load(plain), 8)
  np.testing.assert_allclose(models_test.chain(model, 8), want, atol=1e-4)


def test_few_bits_of_other_layouts_are_refused(tmp_path):
  """That of Meta's own float8."""
  write_with_tower(tmp_path, quantization_config={'quant_method': 'fbgemm_fp8'})
  check_refused(tmp_path, 'quantization_config=.*fbgemm')
