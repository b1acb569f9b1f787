"""Models with weights of int8 and int4.

The integers are compared with those of numpy; a quantized model must decode as
a plain one whose weights are rounded like that, in every mode.
"""

import dataclasses
import re

import decoding_cases
import engine_cases
import jax
import ml_dtypes
import numpy as np
import pytest
from decoding_cases import assert_same, requests_of
from flags_test import given
from models_test import chain

import swiftspec_jax as ss
from kernels_pallas.quantized_matmul import tiles
from swiftspec_jax import config as config_lib
from swiftspec_jax import testing
from swiftspec_jax.cli.flags import shared_flags
from swiftspec_jax.distillation import student
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.matrices import quantization, transposed

# The highest weight lies almost half a step past the last integer.
LIMITS = {'int8': 127.5 / 1.001, 'int4': 7.5 / 1.001, 'float8': 448 / 1.001}
CONFIG = dataclasses.replace(decoding_cases.CONFIG, num_layers=2)
# Two devices do not divide the kv heads, nor the groups of ffw.
ODD = dataclasses.replace(
  decoding_cases.CONFIG, embed_dim=40, num_heads=9, num_kv_heads=3, ffw_dim=72
)
# Read in chunks of one size.
REQUESTS = requests_of(3, longest_prompt=40, max_new_tokens=24)
# What adds nothing to the products of others is left out.
FAMILIES = sorted({*testing.TINY_FAMILIES} - {'llama', 'llama3', 'mistral'})


def oracle(weight, weight_dtype, group_size):
  """Returns values and scales f32 of a matrix [K, N]."""
  size = len(weight) if weight_dtype == 'int8' else group_size
  groups = weight.reshape(-1, size, weight.shape[1]).astype(np.float32)
  limit = np.float32(LIMITS[weight_dtype])
  highest = np.abs(groups).max(axis=1)
  scales = np.where(highest == 0, 1, highest / limit)
  values = groups / scales[:, None]
  if weight_dtype == 'float8':
    values = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  else:
    values = np.rint(values)
  return values.reshape(weight.shape), scales


def rounded(model, weight_dtype):
  """Returns the plain model with the weights that the oracle stores."""
  config = model.config
  heads = config.num_query_groups * config.head_dim
  inputs = {
    'qkv': (1, config.embed_dim),
    'attention_out': (3, heads),
    'gate_up': (1, config.embed_dim),
    'down': (1, config.ffw_dim),
    'shared_gate_up': (1, config.embed_dim),
    'shared_down': (1, config.expert_ffw_dim),
  }

  def round_matrix(weight, unit):
    values, scales = oracle(weight, weight_dtype, config_lib.group_size(unit))
    return values * np.repeat(scales, len(weight) // len(scales), axis=0)

  def round_weight(name, array):
    if name in ('experts_gate', 'experts_up', 'experts_down'):
      experts = map(np.asarray, array)
      return np.stack([round_matrix(x, array.shape[1]) for x in experts])
    if name not in inputs:
      return array
    num_in_axes, unit = inputs[name]
    weight = array.reshape(np.prod(array.shape[:num_in_axes]), -1)
    return round_matrix(weight, unit).reshape(array.shape)

  arrays = transposed.undone(jax.device_get(model.params))
  arrays['layers'] = [
    {name: round_weight(name, array) for name, array in layer.items()}
    for layer in arrays['layers']
  ]
  specs = params_lib.param_specs(config)
  params = params_lib.place_params(arrays, specs, model.dtype, model.mesh)
  return dataclasses.replace(model, params=params)


def model_of(weight_dtype, config=CONFIG, devices=None):
  config = dataclasses.replace(
    config, weight_dtype=weight_dtype, kernels='reference'
  )
  return testing.random_model(config, devices=devices)


def results_of(*args, **options):
  return decoding_cases.run(ss.Decoder(*args, **options), REQUESTS)


def test_group_sizes():
  sizes = {576: 64, 1536: 128, 14_336: 128, 192: 64, 45: 1}
  assert {size: config_lib.group_size(size) for size in sizes} == sizes


@pytest.mark.parametrize('weight_dtype', LIMITS)
def test_integers_and_scales(weight_dtype):
  plain, model = model_of(None), model_of(weight_dtype)
  params = transposed.undone(jax.device_get(plain.params))
  weight = params['layers'][1]['down']
  matrix = model.params['layers'][1]['down']
  integers, scales = oracle(weight, weight_dtype, 64)
  assert matrix.values.dtype == quantization.VALUE_DTYPES[weight_dtype]
  np.testing.assert_array_equal(np.asarray(matrix.values)[0], integers)
  np.testing.assert_allclose(np.asarray(matrix.scales)[0], scales, rtol=1e-6)
  saved = plain.num_bytes - model.num_bytes
  num_weights = 2 * 32 * (8 * 8 + 4 * 8 + 3 * 64)
  # Scales take the rest: four bytes for 32 or 64 inputs.
  num_bytes = 4 - tiles.BITS[matrix.values.dtype.name] / 8
  assert 0.8 < saved / (num_weights * num_bytes) < 1


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_of_every_family(tmp_path, family):
  weight_dtype = 'int8' if family == 'gpt_oss' else 'int4'
  testing.write_tiny_checkpoint(tmp_path, family)
  plain = rounded(ss.load(tmp_path), weight_dtype)
  options = {'weight_dtype': weight_dtype, 'kernels': 'reference'}
  model = ss.load(tmp_path, **options)
  assert model.name == f'{tmp_path} ({weight_dtype})'
  logits = [chain(each, 8) for each in (plain, model)]
  # One of the weights may lie right between two integers of int8.
  is_int8 = weight_dtype == 'int8'
  np.testing.assert_allclose(*logits, atol=1e-2 if is_int8 else 1e-4)


@pytest.mark.parametrize('weight_dtype', LIMITS)
def test_greedy_output_is_that_of_rounded_weights(weight_dtype):
  target = model_of(weight_dtype)
  want = results_of(rounded(model_of(None), weight_dtype))
  assert_same(results_of(target), want)


@pytest.mark.parametrize('weight_dtype', LIMITS)
def test_the_engine_takes_quantized_models(weight_dtype):
  target = model_of(weight_dtype)
  chains = engine_cases.ALL_OR_NONE
  engine = engine_cases.make_engine(target, chains=chains, target=target)
  got = engine_cases.results_of(engine, REQUESTS)
  assert_same(got, results_of(target))


@pytest.mark.parametrize(
  ('config', 'weight_dtype'),
  [(CONFIG, 'int4'), (ODD, 'int4'), (ODD, 'int8'), (ODD, 'float8')],
)
def test_sharded_models_are_the_same(config, weight_dtype):
  one = model_of(weight_dtype, config)
  two = model_of(weight_dtype, config, jax.devices()[:2])
  for name in ('qkv', 'attention_out', 'gate_up', 'down'):
    whole, parts = (m.params['layers'][0][name] for m in (one, two))
    size = tuple(slice(n) for n in whole.values.shape)
    np.testing.assert_array_equal(
      np.asarray(parts.values)[size], np.asarray(whole.values)
    )
    shard = parts.values.sharding.shard_shape(parts.values.shape)
    assert np.prod(shard) * 2 == parts.values.size
  # Others have fewer cases to get wrong, and float8 has those of int4.
  if config == ODD and weight_dtype != 'float8':
    assert_same(results_of(two), results_of(one))


def test_what_is_refused(tmp_path, model):
  with pytest.raises(
    ss.UserError, match='weight_dtype must be one of int8, int4, float8, int8_'
  ):
    ss.load(model, weight_dtype='int3')
  with pytest.raises(
    ss.UserError,
    match=re.escape(f'{model} (int8) is quantized to int8; load it without'),
  ):
    ss.save(ss.load(model, weight_dtype='int8'), tmp_path / 'saved')
  quantized = dataclasses.replace(CONFIG, weight_dtype='int8')
  with pytest.raises(
    ss.UserError, match='target is quantized to int8; load it'
  ):
    student.StudentConfig(num_layers=1).model_config(quantized)


def test_saved_models_can_be_quantized(tmp_path, model):
  ss.save(ss.load(model), tmp_path / 'saved')
  again = ss.load(tmp_path / 'saved', weight_dtype='int4')
  want = ss.load(model, weight_dtype='int4')
  jax.tree.map(np.testing.assert_array_equal, again.params, want.params)


def test_the_flag_is_for_target_and_draft(model):
  with given(target=str(model), draft=str(model), weight_dtype='int4'):
    target = shared_flags.load_target()
    drafts = shared_flags.load_drafts(target, ['serial'])
    assert shared_flags.to_json()['weight_dtype'] == 'int4'
    assert shared_flags.load_target('int8').config.weight_dtype == 'int8'
    with given(draft_weight_dtype='int8_dynamic'):
      other = shared_flags.load_draft(target, 'serial')
  assert other.config.weight_dtype == 'int8_dynamic'
  assert target.config.weight_dtype == 'int4'
  assert drafts['serial'].config.weight_dtype == 'int4'
