"""Checkpoints of int8 by llm-compressor against the weights they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import assert_weights, check_refused, write_pair
from models_test import chain, tree

import swiftspec_jax as ss

SIZES = {'num_hidden_layers': 1, 'hidden_size': 64, 'intermediate_size': 96}


def options_of(**weights):
  """What config.json says of W8A8 and W8A16."""
  return {
    'quant_method': 'compressed-tensors',
    'format': 'int-quantized',
    'config_groups': {
      'group_0': {
        'targets': ['Linear'],
        'input_activations': {'num_bits': 8, 'strategy': 'token'},
        'weights': {
          'num_bits': 8,
          'type': 'int',
          'symmetric': True,
          'strategy': 'channel',
          **weights,
        },
      }
    },
    'ignore': ['lm_head'],
  }


# Name: inputs that share a scale (None: all, 0: outputs, too), whether packed.
CASES = {'channel': (None, False), 'tensor': (0, False), 'group': (16, True)}


def write(directory, case, family='llama', **changes):
  """Writes a checkpoint of int8, and beside it one of the same weights."""
  size, is_packed = CASES[case]

  def quantize(name, weight, generator):
    if not name.endswith('_proj.weight'):
      return None
    num_outputs, num_inputs = weight.shape
    num_groups = num_inputs // size if size else 1
    integers = generator.integers(-128, 128, weight.shape)
    shape = (1,) if size == 0 else (num_outputs, num_groups)
    scales = generator.uniform(0.5, 1.5, shape).astype(np.float16) / 1024
    wide = np.broadcast_to(scales.astype(np.float32), (num_outputs, num_groups))
    wide = integers * wide.repeat(num_inputs // num_groups, axis=1)
    stored = {name: integers.astype(np.int8)}
    if is_packed:
      packed = [
        [
          sum(int(row[i + j] + 128) << 8 * j for j in range(4))
          for i in range(0, num_inputs, 4)
        ]
        for row in integers
      ]
      stored = {f'{name}_packed': np.array(packed, np.uint32).view(np.int32)}
    return wide.astype(np.float32), {**stored, f'{name}_scale': scales}

  options = options_of(strategy=case, group_size=size)
  if is_packed:
    options['format'] = 'pack-quantized'
  return write_pair(directory, family, quantize, options, changes, **SIZES)


@pytest.mark.parametrize('case', CASES)
def test_weights_are_those_of_the_format(tmp_path, case):
  """Exactly, and so are products, on two devices, too."""
  family = 'qwen3_moe' if case == 'group' else 'llama'
  stored, plain = write(tmp_path, case, family)
  model, wide = ss.load(stored, kernels='reference'), ss.load(plain)
  assert model.config.weight_dtype == 'int8'
  assert_weights(model, wide, jnp.int8)
  two = ss.load(stored, devices=jax.devices()[:2])
  for each in (model, two):
    np.testing.assert_allclose(chain(each, 8), chain(wide, 8), atol=1e-4)
  np.testing.assert_allclose(tree(two), tree(wide), atol=1e-4)
  # One CPU keeps 16 bits of the activations.
  np.testing.assert_allclose(tree(ss.load(stored)), tree(wide), atol=1e-3)


@pytest.mark.parametrize(
  ('weights', 'message'),
  [
    ({'symmetric': False}, 'weights.symmetric=False is not'),
    ({'num_bits': 6}, 'weights.num_bits=6 is not'),
    ({'strategy': 'block'}, "weights.strategy='block' is not"),
  ],
)
def test_what_is_not_understood_is_named(tmp_path, weights, message):
  stored, _ = write(tmp_path, 'channel')
  options = options_of(**weights)
  check_refused(stored, message, {'quantization_config': options})


def test_scales_that_do_not_fit_are_named(tmp_path):
  name = 'model.layers.0.mlp.up_proj.weight_scale'
  stored, _ = write(tmp_path, 'channel', **{name: np.ones((96, 7))})
  check_refused(stored, r'up_proj.weight_scale has sha.*7')
  table = np.ones((272, 64), np.int8)
  stored, _ = write(tmp_path, 'channel', **{'model.embed_tokens.weight': table})
  check_refused(stored, 'weight is int8, which is')
  check_refused(stored, 'stored as int8 and cannot become', weight_dtype='wide')
