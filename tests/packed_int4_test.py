"""Published checkpoints of int4 against the weights that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import packed_int4_cases as cases
import pytest
from checkpoint_cases import (
  MATRICES,
  assert_weights,
  change_config,
  check_refused,
  dense,
)
from models_test import assert_same_logits, chain
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss

# What a family has beside its layers is another part of the loader.
SIZES = {'num_hidden_layers': 1, 'hidden_size': 64, 'intermediate_size': 96}
ONES = np.ones(48, np.float16)
EXPERT_SIZES = SIZES | {'moe_intermediate_size': 32}


def write_gptq(tmp_path, kind='gptq'):
  return cases.write(
    tmp_path, kind, 'llama', group_size=16, num_hidden_layers=1
  )


def test_a_word_by_hand():
  """0x7654_3210 of AWQ are outputs 0 4 1 5 2 6 3 7, of GPTQ 0 to 7."""
  assert cases.word(range(8)) == 0x76543210
  packed = cases.pack_rows(np.arange(8)[None], cases.AWQ_ORDER)
  assert packed.view(np.uint32)[0, 0] == 0x75316420


@pytest.mark.parametrize('kind', cases.OPTIONS)
@pytest.mark.parametrize(
  ('family', 'group_size', 'is_symmetric', 'sizes'),
  [
    ('qwen2', 16, False, SIZES),
    ('llama', 32, True, SIZES),
    ('llama', -1, False, SIZES),
    ('qwen3_moe', 16, False, EXPERT_SIZES),
  ],
)
def test_weights_are_those_of_the_format(
  tmp_path, kind, family, group_size, is_symmetric, sizes
):
  options = {'group_size': group_size, 'is_symmetric': is_symmetric}
  packed, plain = cases.write(tmp_path, kind, family, **options, **sizes)
  model = ss.load(packed, kernels='reference')
  assert model.config.weight_dtype == 'int4'
  assert_weights(model, ss.load(plain, kernels='reference'), jnp.int4)
  for layer in model.params['layers']:
    for name in layer.keys() & MATRICES:
      assert (layer[name].offsets is None) == is_symmetric


@pytest.mark.parametrize('is_symmetric', [True, False])
def test_one_cpu_multiplies_them_in_blocks(tmp_path, is_symmetric):
  """Q4_0, or Q4_1 whose offsets of up to 8 steps are rounded to 11 bits."""
  packed, plain = cases.write(
    tmp_path, 'gptq', 'llama', group_size=32, is_symmetric=is_symmetric, **SIZES
  )
  model, wide = ss.load(packed), ss.load(plain)
  matrix, other = (
    each.params['layers'][0]['down']
    for each in (model, ss.load(packed, kernels='reference'))
  )
  want = dense(other)[0].T
  assert matrix.kinds == ('Q4_0' if is_symmetric else 'Q4_1',)
  assert matrix.tensors[0].nbytes < 0.7 * want.size
  step = 0 if is_symmetric else np.abs(other.scales).max()
  np.testing.assert_allclose(
    matrix.dequantized(), want, rtol=0, atol=16 * step / 2**12
  )
  want = chain(wide, 8)
  assert np.abs(chain(model, 8) - want).max() < 0.05 * np.abs(want).max()


def test_matrices_may_be_as_they_were(tmp_path):
  """All of the attention, say; tensors tell, whatever the config names."""
  packed, plain = write_gptq(tmp_path)
  stored, weights = (
    safetensors_numpy.load_file(path / 'model.safetensors')
    for path in (packed, plain)
  )
  stored = {n: x for n, x in stored.items() if 'self_attn' not in n}
  stored |= {n: x for n, x in weights.items() if 'self_attn' in n}
  safetensors_numpy.save_file(stored, packed / 'model.safetensors')
  options = cases.options_of('gptq', 16) | {'dynamic': {'-:.*attn.*': {}}}
  change_config(packed, quantization_config=options)
  layer, other = (ss.load(path).params['layers'][0] for path in (packed, plain))
  assert layer['down'].values.dtype == jnp.int4
  np.testing.assert_array_equal(layer['qkv'].values, other['qkv'].values)


@pytest.mark.parametrize(
  ('family', 'num_devices', 'sizes'),
  [('qwen2', 3, SIZES), ('qwen3_moe', 2, EXPERT_SIZES)],
)
def test_logits_are_those_of_the_weights(tmp_path, family, num_devices, sizes):
  """In chunks and in a tree, also over more devices than kv heads."""
  packed, plain = cases.write(tmp_path, 'awq', family, group_size=32, **sizes)
  model = ss.load(packed, devices=jax.devices()[:num_devices])
  wide = ss.load(plain)
  assert_same_logits(model, wide, atol=1e-4)
  want, narrow = chain(wide, 8), ss.load(packed, dtype='bfloat16')
  assert np.abs(chain(narrow, 8) - want).max() < 0.1 * np.abs(want).max()
  # Quantized again it would be other weights.
  check_refused(packed, 'stored as int4 and cannot become', weight_dtype='int8')


@pytest.mark.parametrize(
  ('kind', 'changes', 'message'),
  [
    ('awq', {'bits': 8}, r'quantization_config.bits=8 is not .* must be 4'),
    ('awq', {'version': 'gemv'}, "version='gemv' is not supported"),
    ('awq', {'zero_point': False}, 'zero_point=False is not supported'),
    ('gptq', {'desc_act': True}, 'desc_act=True is not .* must be false'),
    ('gptq', {'checkpoint_format': 'marlin'}, "checkpoint_format='marlin'"),
    ('gptq', {'dynamic': {'+:.*': {'bits': 8}}}, 'dynamic='),
    ('gptq', {'rotation': 'h'}, "rotation='h' is not .* not understood"),
    ('gptq', {'group_size': 0}, 'group_size=0 is not supported'),
    ('gptq', {'group_size': 40}, 'no multiple of group_size=40'),
    (
      cases.COMPRESSED,
      {'config_groups': {'all': {'weights': {'num_bits': 3}}}},
      'config_groups.all.weights.num_bits=3 is not .* must be 4',
    ),
    ('gptq', {'quant_method': 'hqq'}, 'quantization_config='),
  ],
)
def test_what_is_not_understood_is_named(tmp_path, kind, changes, message):
  packed, _ = write_gptq(tmp_path, kind)
  options = cases.options_of(kind, 16) | changes
  check_refused(packed, message, {'quantization_config': options})


@pytest.mark.parametrize(
  ('name', 'tensor', 'message'),
  [
    ('mlp.up_proj.qweight', None, 'up_proj.qweight is missing'),
    ('mlp.up_proj.scales', ONES[None], r'has shape \(1, 48\)'),
    ('mlp.up_proj.g_idx', np.zeros(32, np.int32), 'inputs in another order'),
    ('mlp.up_proj.bias', ONES, 'bias is not zero'),
    ('mlp.up_proj.bias', 0 * ONES, None),
  ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, tensor, message):
  packed, _ = write_gptq(tmp_path)
  path, name = packed / 'model.safetensors', f'model.layers.0.{name}'
  weights = safetensors_numpy.load_file(path)
  weights.pop(name, None)
  if tensor is not None:
    weights[name] = tensor
  safetensors_numpy.save_file(weights, path)
  if message is None:
    ss.load(packed)
  else:
    check_refused(packed, message)
