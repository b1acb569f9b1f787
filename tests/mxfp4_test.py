"""The experts of gpt-oss in MXFP4 against the numbers that they stand for."""

import jax
import numpy as np
import pytest
from models_test import IDS, chain, tree
from packed_int4_cases import change_config
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.checkpoint import mxfp4

NUMBERS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
CONFIG = {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}
# Whole blocks of 32.
SIZES = {'hidden_size': 64, 'intermediate_size': 32}


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
  """Writes a checkpoint with packed experts, and one of the same weights.

  Args:
    directory: folder for both.
    changes: tensors of the first in the place of others.

  Returns:
    Both directories.
  """
  stored, plain = directory / 'stored', directory / 'plain'
  for path in (stored, plain):
    testing.write_tiny_checkpoint(path, 'gpt_oss', **SIZES)
  weights = safetensors_numpy.load_file(plain / 'model.safetensors')
  generator = np.random.default_rng(0)
  tensors = dict(weights)
  for name in sorted(weights):
    if not name.endswith(('gate_up_proj', 'down_proj')):
      continue
    num_experts, num_inputs, num_outputs = weights[name].shape
    shape = num_experts, num_outputs, num_inputs // 32
    blocks = generator.integers(0, 256, (*shape, 16)).astype(np.uint8)
    scales = generator.integers(122, 126, shape).astype(np.uint8)
    weights[name] = wide(blocks, scales)
    del tensors[name]
    tensors |= {f'{name}_blocks': blocks, f'{name}_scales': scales}
  tensors |= changes or {}
  safetensors_numpy.save_file(tensors, stored / 'model.safetensors')
  safetensors_numpy.save_file(weights, plain / 'model.safetensors')
  change_config(stored, quantization_config=CONFIG)
  return stored, plain


def test_numbers_by_hand():
  """Byte 0xA3 with exponent 128: 1.5 and -1, doubled."""
  tensors = {
    'w_blocks': np.full((1, 1, 1, 16), 0xA3, np.uint8),
    'w_scales': np.full((1, 1, 1), 128, np.uint8),
  }
  numbers = mxfp4.widened(tensors.get, tensors.__contains__, 'w')
  assert numbers[0, :, 0].tolist() == [3, -2] * 16


def test_weights_are_those_of_the_format(tmp_path):
  """Exactly, in bfloat16, too."""
  stored, plain = write(tmp_path)
  model, expected = ss.load(stored), ss.load(plain)
  assert model.config == expected.config
  jax.tree.map(np.testing.assert_array_equal, model.params, expected.params)
  narrow = ss.load(stored, dtype='bfloat16')
  for layer, other in zip(
    narrow.params['layers'], expected.params['layers'], strict=True
  ):
    np.testing.assert_array_equal(layer['experts_up'], other['experts_up'])


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
  change_config(stored, **changes)
  with pytest.raises(errors.UserError, match=message):
    ss.load(stored)


def test_scales_that_do_not_fit_are_named(tmp_path):
  name = 'model.layers.1.mlp.experts.down_proj_scales'
  stored, _ = write(tmp_path, {name: np.ones((6, 64, 2), np.uint8)})
  message = r'uint8\(6, 64, 1, 16\) and uint8\(6, 64, 2\); MXFP4 is'
  with pytest.raises(errors.UserError, match=message):
    ss.load(stored)


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
  ours = mxfp4.widened(tensors.get, tensors.__contains__, 'w')
  np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())


@pytest.mark.peers
def test_logits_equal_those_of_transformers(tmp_path):
  record_models = pytest.importorskip('golden.record_models')
  stored, _ = write(tmp_path)
  model, peer = ss.load(stored), record_models.load_peer(stored)
  np.testing.assert_allclose(
    chain(model, 8), record_models.chain_logits(peer, IDS), atol=1e-4
  )
  np.testing.assert_allclose(
    tree(model), record_models.tree_logits(peer, IDS), atol=1e-4
  )
