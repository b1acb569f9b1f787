"""Checkpoints of float8 against the weights that they stand for."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import MATRICES, assert_weights, check_refused, write_pair
from models_test import IDS, chain, tree

import swiftspec_jax as ss
from swiftspec_jax.models.matrices import transposed

FP8 = {
  'quant_method': 'fp8',
  'fmt': 'e4m3',
  'activation_scheme': 'dynamic',
  'weight_block_size': [20, 12],
  'modules_to_not_convert': ['lm_head'],
}
WEIGHTS = {
  'num_bits': 8,
  'type': 'float',
  'strategy': 'channel',
  'symmetric': True,
  'dynamic': False,
  'group_size': None,
  'observer': 'minmax',
}


def compressed(**weights):
  return {
    'quant_method': 'compressed-tensors',
    'format': 'float-quantized',
    'quantization_status': 'compressed',
    'config_groups': {
      'group_0': {
        'targets': ['Linear'],
        'input_activations': {'num_bits': 8, 'dynamic': True},
        'output_activations': None,
        'weights': WEIGHTS | weights,
      }
    },
    'kv_cache_scheme': None,
    'sparsity_config': {},
    'transform_config': {},
    'ignore': ['lm_head'],
  }


# Name: the config, outputs and inputs of a block, suffix and dtype of scales.
CASES = {
  'blocks': (FP8, (20, 12), '_scale_inv', ml_dtypes.bfloat16),
  'blocks_e8m0': (
    FP8 | {'scale_fmt': 'ue8m0'},
    (20, 12),
    '_scale_inv',
    ml_dtypes.float8_e8m0fnu,
  ),
  'tensor': (
    {'quant_method': 'fp8', 'activation_scheme': 'static'},
    (None, None),
    '_scale',
    np.float32,
  ),
  'even_blocks': (
    FP8 | {'weight_block_size': [16, 8]},
    (16, 8),
    '_scale_inv',
    np.float32,
  ),
  'channels': (compressed(), (1, None), '_scale', ml_dtypes.bfloat16),
  'groups': (
    compressed(strategy='group', group_size=16),
    (1, 16),
    '_scale',
    np.float32,
  ),
  'compressed_blocks': (
    compressed(strategy='block', block_structure=[20, 12]),
    (20, 12),
    '_scale',
    np.float32,
  ),
}


def write(directory, case, family, changes=None, **config):
  """Writes a checkpoint of float8, and beside it one of the same weights."""
  options, block, suffix, dtype = CASES[case]

  def quantize(name, weight, generator):
    if not name.endswith('_proj.weight'):
      return None
    shape = weight.shape
    size = [part or whole for part, whole in zip(block, shape, strict=True)]
    counts = [-(-n // part) for n, part in zip(shape, size, strict=True)]
    scales = generator.uniform(0.5, 1.5, counts).astype(dtype)
    numbers = weight.astype(ml_dtypes.float8_e4m3fn)
    # A loop over blocks is hard to get wrong.
    wide = numbers.astype(np.float32)
    for i, j in np.ndindex(*counts):
      rows = slice(i * size[0], (i + 1) * size[0])
      columns = slice(j * size[1], (j + 1) * size[1])
      wide[rows, columns] *= np.float32(scales[i, j])
    # Some write the scale of a matrix without axes.
    if counts == [1, 1] and 'q_proj' not in name:
      scales = scales.reshape(())
    return wide, {name: numbers, name + suffix: scales}

  return write_pair(directory, family, quantize, options, changes, **config)


@pytest.mark.parametrize('case', CASES)
def test_weights_are_those_of_the_format(tmp_path, case):
  """Exactly, also where blocks do not divide a matrix."""
  family = 'qwen3_moe' if case == 'blocks' else 'llama'
  stored, plain = write(tmp_path, case, family)
  model, wide = ss.load(stored), ss.load(plain)
  assert model.config.weight_dtype == 'float8'
  assert_weights(model, wide, jnp.float8_e4m3fn)
  again = ss.load(stored, weight_dtype='wide')
  assert again.config == wide.config
  jax.tree.map(np.testing.assert_array_equal, again.params, wide.params)


def test_products_are_those_of_the_weights(tmp_path):
  """To the last bit in float32, and in bfloat16."""
  stored, plain = write(tmp_path, 'even_blocks', 'llama')
  model, wide = ss.load(stored), ss.load(plain)
  params = transposed.undone(jax.device_get(wide.params))
  generator = np.random.default_rng(0)
  for name, num_in_axes in (('qkv', 1), ('attention_out', 3), ('down', 1)):
    weight = params['layers'][1][name]
    shape = math.prod(weight.shape[:num_in_axes]), -1
    for dtype in (np.float32, ml_dtypes.bfloat16):
      rows = generator.normal(size=(5, shape[0])).astype(dtype)
      product = jax.jit(type(model.params['layers'][1][name]).multiply)(
        model.params['layers'][1][name], rows
      )
      expected = jax.jit(jnp.dot)(rows, weight.reshape(shape).astype(dtype))
      np.testing.assert_array_equal(np.reshape(product, (5, -1)), expected)


@pytest.mark.parametrize('family', ['llama', 'qwen3_moe'])
def test_memory_of_the_matrices_is_that_of_the_files(tmp_path, family):
  """One byte a weight, and four for the scale of a group of inputs."""
  stored, plain = write(tmp_path, 'channels', family)
  sizes = [
    sum(
      x.nbytes
      for layer in model.params['layers']
      for x in jax.tree.leaves(
        [layer[name] for name in layer.keys() & MATRICES]
      )
    )
    for model in (ss.load(stored), ss.load(plain, dtype='bfloat16'))
  ]
  assert 0.5 < sizes[0] / sizes[1] < 0.6


def test_logits_over_devices(tmp_path):
  """Of blocks that devices do not divide, in chunks and in a tree."""
  stored, plain = write(tmp_path, 'blocks', 'qwen3_moe')
  model = ss.load(stored, devices=jax.devices()[:4])
  wide = ss.load(plain)
  np.testing.assert_allclose(chain(model, 8), chain(wide, 8), atol=1e-4)
  np.testing.assert_allclose(tree(model), tree(wide), atol=1e-4)


def test_a_head_of_float8_is_widened(tmp_path):
  name = 'lm_head.weight'
  numbers = np.arange(272 * 32, dtype=np.float32).reshape(272, 32) % 7
  stored, _ = write(
    tmp_path,
    'channels',
    'llama',
    {
      name: numbers.astype(ml_dtypes.float8_e4m3fn),
      f'{name}_scale': np.full((272, 1), 3, np.float32),
    },
    tie_word_embeddings=False,
  )
  params = ss.load(stored).params
  np.testing.assert_array_equal(params['unembedding'], 3 * numbers)


def test_what_is_not_converted_stays_as_it_is(tmp_path):
  """The matrices of a layer are; parts of one are refused."""
  name = 'model.layers.0.mlp.down_proj.weight'
  weight = np.ones((32, 48), np.float32)
  stored, _ = write(
    tmp_path, 'channels', 'llama', {name: weight, f'{name}_scale': None}
  )
  model = ss.load(stored)
  np.testing.assert_array_equal(
    transposed.undone(jax.device_get(model.params))['layers'][0]['down'],
    weight.T,
  )
  name = name.replace('down', 'up')
  stored, _ = write(
    tmp_path,
    'channels',
    'llama',
    {name: np.ones((48, 32), np.float32), f'{name}_scale': None},
  )
  check_refused(stored, 'up_proj only some are quantized')
  ss.load(stored, weight_dtype='wide')


def test_a_rounded_model_is_close(tmp_path):
  """On two devices, in bfloat16, as it is, widened and as int8."""
  stored, plain = write(tmp_path, 'blocks', 'llama')
  expected = chain(ss.load(plain), 8)
  for options in (
    {'dtype': 'bfloat16', 'devices': jax.devices()[:2]},
    {'dtype': 'bfloat16', 'weight_dtype': 'wide'},
    {'weight_dtype': 'int8'},
  ):
    difference = np.abs(chain(ss.load(stored, **options), 8) - expected)
    assert 0 < difference.max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (FP8 | {'fmt': 'e5m2'}, "quantization_config.fmt='e5m2' .* must be"),
    (FP8 | {'expert_dtype': 'fp4'}, "expert_dtype='fp4' is not supported"),
    (FP8 | {'rotation': 'h'}, "rotation='h' is not .* not understood"),
    (FP8 | {'weight_block_size': [128]}, r'weight_block_size=\[128\] is not'),
    (
      FP8 | {'weight_block_size': [15, 12]},
      r'weight_scale_inv has shape \(2, 3\), the config says \(3, 3\)',
    ),
    (compressed() | {'format': 'mxfp8-quantized'}, "format='mxfp8-quantized'"),
    (compressed() | {'transform_config': {'R1': {}}}, 'transform_config='),
    (compressed() | {'sparsity_config': {'format': 'bitmask'}}, 'sparsity_con'),
    (compressed() | {'config_groups': {}}, 'config_groups={} is not supported'),
    (compressed(num_bits=4), 'group_0.weights.num_bits=4 is not'),
    (compressed(type='int'), "weights.type='int' is not supported"),
    (compressed(strategy='tensor_group'), 'strategy=.*tensor_group'),
    (compressed(strategy='block'), 'block_structure=None is not'),
    (compressed(symmetric=False), 'weights.symmetric=False is not'),
    (None, r'_proj.weight is float8_e4m3fn without a scale that'),
  ],
)
def test_what_is_not_understood_is_named(tmp_path, options, message):
  stored, _ = write(tmp_path, 'blocks', 'llama', num_hidden_layers=1)
  check_refused(stored, message, {'quantization_config': options})


@pytest.mark.parametrize(
  ('tensor', 'message'),
  [
    (None, 'up_proj.weight is float8_e4m3fn without a scale'),
    (np.ones((3, 3), np.uint8), 'up_proj.weight_scale_inv is uint8, no dtype'),
    (np.ones((1, 3), np.float32), r'has shape \(1, 3\), the config says'),
  ],
)
def test_scales_that_do_not_fit_are_named(tmp_path, tensor, message):
  name = 'model.layers.0.mlp.up_proj.weight_scale_inv'
  stored, _ = write(tmp_path, 'blocks', 'llama', {name: tensor})
  check_refused(stored, message)


@pytest.mark.peers
@pytest.mark.parametrize('family', ['qwen3', 'qwen3_moe'])
def test_equals_transformers_live(tmp_path, family):
  record_models = pytest.importorskip('golden.record_models')
  stored, _ = write(tmp_path, 'even_blocks', family, moe_intermediate_size=32)
  peer = record_models.load_peer(stored)
  np.testing.assert_allclose(
    chain(ss.load(stored), len(IDS)),
    record_models.chain_logits(peer, IDS),
    atol=1e-4,
  )
