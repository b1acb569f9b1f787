"""The experts of gpt-oss in MXFP4 against the numbers that they stand for."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import check_refused, write_pair
from experts_test import GPT_OSS
from models_test import assert_same_as_peer, assert_same_logits

import swiftspec_jax as ss
from kernels_pallas.quantized_matmul import float4, reference
from swiftspec_jax import testing
from swiftspec_jax.checkpoint.quantized import mxfp4
from swiftspec_jax.simulator.planning import forward as forward_lib

NUMBERS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
CONFIG = {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}
# Whole blocks of 32.
SIZES = {'hidden_size': 64, 'intermediate_size': 32}
widened = jax.jit(reference.widened)


def wide(blocks, scales):
  """Number by number: [X, N, groups, 16] and [X, N, groups] to [X, K, N]."""
  num_experts, num_outputs, num_groups = scales.shape
  result = np.zeros((num_experts, 32 * num_groups, num_outputs), np.float32)
  for (x, n, group, i), byte in np.ndenumerate(blocks):
    scale = 2.0 ** (int(scales[x, n, group]) - 127)
    row = 32 * group + 2 * i
    result[x, row, n] = NUMBERS[byte & 15] * scale
    result[x, row + 1, n] = NUMBERS[byte >> 4] * scale
  return result


def write(directory, changes=None):
  """Writes a checkpoint with packed experts, and one of the same weights."""

  def quantize(name, weight, generator):
    if not name.endswith(('gate_up_proj', 'down_proj')):
      return None
    num_experts, num_inputs, num_outputs = weight.shape
    shape = num_experts, num_outputs, num_inputs // 32
    blocks = generator.integers(0, 256, (*shape, 16)).astype(np.uint8)
    scales = generator.integers(122, 126, shape).astype(np.uint8)
    tensors = {f'{name}_blocks': blocks, f'{name}_scales': scales}
    return wide(blocks, scales), tensors

  return write_pair(directory, 'gpt_oss', quantize, CONFIG, changes, **SIZES)


def test_weights_are_those_of_the_format(tmp_path):
  """Exactly, as they are stored and widened to bfloat16."""
  stored, plain = write(tmp_path)
  expected = ss.load(plain)
  wide = ss.load(stored, weight_dtype='wide')
  assert wide.config == expected.config
  jax.tree.map(np.testing.assert_array_equal, wide.params, expected.params)
  half = ss.load(stored, dtype='bfloat16', weight_dtype='wide')
  narrow = ss.load(stored)
  assert narrow.config.weight_dtype == 'mxfp4'
  for layers in zip(
    *(model.params['layers'] for model in (narrow, half, expected)), strict=True
  ):
    for name in ('experts_gate', 'experts_up', 'experts_down'):
      matrix, *weights = (layer[name] for layer in layers)
      np.testing.assert_array_equal(
        widened(matrix.values, matrix.scales), weights[1]
      )
      np.testing.assert_array_equal(*weights)
      # Four bits and a byte for 32 of them; CPUs have a byte for each four.
      assert matrix.values.dtype == jnp.int4
      assert matrix.scales.nbytes * 32 == matrix.values.size


def test_logits_are_those_of_the_weights(tmp_path):
  """In chunks and in a tree, over devices that share one block."""
  stored, plain = write(tmp_path)
  model = ss.load(stored, devices=jax.devices()[:4])
  assert_same_logits(model, ss.load(plain), atol=1e-4)


def test_bytes_are_those_of_four_bits_and_scales():
  """On accelerators, and in plans."""
  config = dataclasses.replace(GPT_OSS, weight_dtype='mxfp4')
  model = testing.random_model(config, dtype=jnp.bfloat16)
  matrix = model.params['layers'][0]['experts_up']
  alone = dataclasses.replace(model, params=[matrix])
  size = math.gcd(matrix.values.shape[1], 32)
  assert alone.num_bytes == matrix.values.size * (4 + 8 / size) / 8
  assert forward_lib.weights_of(config).held == model.num_bytes


def test_a_model_becomes_mxfp4():
  """By section 6.3 of OCP: the highest number of a block is 4 to 6 scales."""
  config = dataclasses.replace(GPT_OSS, weight_dtype='mxfp4')
  plain, model = testing.random_model(GPT_OSS), testing.random_model(config)
  weights = np.asarray(plain.params['layers'][0]['experts_up'])
  matrix = model.params['layers'][0]['experts_up']
  scales = np.asarray(matrix.scales, np.int32)
  numbers = np.asarray(jax.jit(float4.numbers)(matrix.values))
  num_experts, num_inputs, num_outputs = weights.shape
  size = math.gcd(num_inputs, 32)
  for x, n, c in np.ndindex(num_experts, num_outputs, num_inputs // size):
    rows = slice(c * size, (c + 1) * size)
    block = weights[x, rows, n]
    scale = 2.0 ** (math.floor(math.log2(np.abs(block).max())) - 2)
    assert 2.0 ** (scales[x, c, n] - 127) == scale
    exact = np.clip(block / scale, -6, 6)
    nearest = exact.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    # XLA rounds to bfloat16 first.
    off = np.abs(numbers[x, rows, n] - exact)
    assert (off <= np.abs(nearest - exact) + 2**-5).all()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'quantization_config': CONFIG | {'bits': 4}}, 'bits=4 is not supported'),
    ({'model_type': 'qwen3_moe'}, 'it is read for gpt_oss, not for qwen3_moe'),
    ({'quantization_config': {'quant_method': 'nvfp4'}}, 'nvfp4'),
  ],
)
def test_what_is_not_understood_is_named(tmp_path, changes, message):
  stored, _ = write(tmp_path)
  check_refused(stored, message, changes)


def test_scales_that_do_not_fit_are_named(tmp_path):
  name = 'model.layers.1.mlp.experts.down_proj_scales'
  stored, _ = write(tmp_path, {name: np.ones((6, 64, 2), np.uint8)})
  message = r'uint8\(6, 64, 1, 16\) and uint8\(6, 64, 2\); MXFP4 is'
  check_refused(stored, message)


@pytest.mark.peers
def test_numbers_equal_those_of_transformers(tmp_path):
  torch = pytest.importorskip('torch')
  from transformers.integrations import mxfp4 as peer

  generator = np.random.default_rng(1)
  blocks = generator.integers(0, 256, (3, 64, 2, 16)).astype(np.uint8)
  scales = generator.integers(1, 250, (3, 64, 2)).astype(np.uint8)
  tensors = {'w_blocks': blocks, 'w_scales': scales}
  theirs = peer.convert_moe_packed_tensors(
    torch.tensor(blocks), torch.tensor(scales), dtype=torch.bfloat16
  )
  ours = mxfp4.widened(tensors, 'w')
  np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())


@pytest.mark.peers
def test_logits_equal_those_of_transformers(tmp_path):
  stored, _ = write(tmp_path)
  assert_same_as_peer(ss.load(stored), stored, chunk_size=8)
