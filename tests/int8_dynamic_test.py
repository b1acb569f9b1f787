"""Models that multiply int8 by int8.

The oracle is numpy: integers of weights and rows, and their exact sums. Logits
of a model may depend on the order of sums in its attention; its products may
depend on nothing but the row.
"""

import dataclasses
import re

import decoding_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from decoding_cases import assert_same, requests_of
from models_test import IDS, chain, step_text
from quantized_weights_test import ODD, oracle

import swiftspec_jax as ss
from kernels_pallas import int8_products
from swiftspec_jax import testing
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.matrices import int8_dynamic, transposed
from swiftspec_jax.runtime import sharding

CONFIG = dataclasses.replace(
  decoding_cases.CONFIG, num_layers=2, weight_dtype='int8_dynamic'
)
ODD = dataclasses.replace(ODD, num_layers=2, weight_dtype='int8_dynamic')
NUM_INPUTS = 40


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(rows, num_terms):
  """Returns rows as integers of 8 or 16 bits times their scales."""
  highest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-30)
  steps = rows * (np.float32(127) / highest)
  integers = np.rint(steps)
  if num_terms == 2:
    integers += np.rint((steps - integers) * 254) / 254
  return integers * highest / 127


def table_of(weight, num_devices=1, num_terms=1):
  mesh = sharding.make_mesh(jax.devices()[:num_devices])
  scheme = int8_dynamic.Scheme(in_axes=(1,), num_terms=num_terms)
  return scheme.quantize(weight, ('vocab', 'embed'), mesh)


scores = jax.jit(int8_dynamic.Int8Matrix.scores)


@pytest.mark.parametrize('num_terms', [1, 2])
@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
def test_scores_are_those_of_integers(dtype, num_terms):
  weight = draw(0, 24, NUM_INPUTS).astype(dtype)
  x = draw(1, 5, NUM_INPUTS).astype(dtype)
  x[3] = 0
  integers, scales = oracle(weight.astype(np.float32).T, 'int8', 1)
  rows = rounded(x.astype(np.float32), num_terms)
  table = table_of(weight, num_terms=num_terms)
  np.testing.assert_allclose(
    scores(table, x), (rows @ integers) * scales, rtol=1e-5, atol=1e-6
  )
  product = jax.jit(int8_dynamic.Int8Matrix.multiply)(table, x)
  assert product.dtype == dtype
  indices = np.array([[3, 0], [23, 3]], np.int32)
  taken = jax.jit(int8_dynamic.Int8Matrix.take_rows)(table, indices)
  assert taken.dtype == dtype
  own = (integers * scales).T.astype(np.float32)
  np.testing.assert_allclose(table.dequantized(), own, rtol=1e-6)
  np.testing.assert_allclose(
    np.asarray(taken, np.float32), own[indices], rtol=2.0**-8
  )


@pytest.mark.optimised
@pytest.mark.parametrize(('num_devices', 'num_terms'), [(1, 1), (1, 2), (2, 2)])
def test_a_product_depends_on_its_row_alone(num_devices, num_terms):
  weight = draw(0, 48, NUM_INPUTS)
  table = table_of(weight, num_devices, num_terms=num_terms)
  x = draw(1, 70, NUM_INPUTS) * np.logspace(-3, 3, 70)[:, None]
  x = x.astype(np.float32)
  alone = np.concatenate([scores(table, row[None]) for row in x])
  for num_rows in (2, 3, 8, 9, 16, 70):
    np.testing.assert_array_equal(scores(table, x[:num_rows]), alone[:num_rows])
  beside = np.zeros((8, NUM_INPUTS), np.float32)
  beside[5] = x[3]
  np.testing.assert_array_equal(scores(table, beside)[5], alone[3])


def test_what_is_no_number_stays_none():
  table = table_of(draw(0, 24, NUM_INPUTS))
  x = draw(1, 3, NUM_INPUTS)
  x[1, 7] = np.nan
  product = np.asarray(scores(table, x))
  assert np.isnan(product[1]).all()
  assert np.isfinite(product[[0, 2]]).all()


def test_sums_are_exact():
  highest = np.full((9, 4096), 127, np.int8)
  multiply = jax.jit(int8_products.multiply)
  for num_rows in (1, 9):
    product = multiply(highest[:num_rows], -highest)
    np.testing.assert_array_equal(
      product, np.full((num_rows, 9), -4096 * 127**2)
    )


def quantized(leaf):
  return isinstance(leaf, int8_dynamic.Int8Matrix)


def test_weights_do_not_depend_on_the_devices():
  plain = testing.random_model(dataclasses.replace(ODD, weight_dtype=None))
  one = testing.random_model(ODD)
  two = testing.random_model(ODD, devices=jax.devices()[:2])
  wholes, parts = (
    jax.tree.leaves(model.params, is_leaf=quantized) for model in (one, two)
  )
  assert sum(map(quantized, wholes)) == 4 * ODD.num_layers + 1
  for whole, part in zip(wholes, parts, strict=True):
    if quantized(whole):
      size = tuple(slice(n) for n in whole.values.shape)
      np.testing.assert_array_equal(np.asarray(part.values)[size], whole.values)
      shard = part.values.sharding.shard_shape(part.values.shape)
      assert np.prod(shard) * 2 == part.values.size
  params = transposed.undone(jax.device_get(plain.params))
  weight = params['layers'][1]['attention_out'].reshape(-1, ODD.embed_dim)
  integers, scales = oracle(weight, 'int8', None)
  out = one.params['layers'][1]['attention_out']
  np.testing.assert_array_equal(out.values, integers.T)
  np.testing.assert_allclose(out.scales, scales[0], rtol=1e-6)


@pytest.mark.parametrize('family', ['llama', 'gemma3_text'])
def test_logits_are_nearly_those_of_the_plain_model(tmp_path, family):
  testing.write_tiny_checkpoint(tmp_path, family)
  model = ss.load(tmp_path, weight_dtype='int8_dynamic')
  is_tied = family == 'gemma3_text'
  assert quantized(model.params['embedding']) == is_tied
  assert is_tied or quantized(model.params['unembedding'])
  plain, actual = chain(ss.load(tmp_path), len(IDS)), chain(model, len(IDS))
  assert np.abs(actual - plain).max() < 0.05 * np.abs(plain).max()


def test_logits_do_not_depend_on_the_devices():
  """With the same code on all: several have no native kernels."""
  config = dataclasses.replace(CONFIG, kernels='reference')
  one, two = (
    chain(testing.random_model(config, devices=jax.devices()[:count]), len(IDS))
    for count in (1, 2)
  )
  np.testing.assert_array_equal(two, one)


def test_greedy_output_is_the_same_with_trees():
  target = testing.random_model(CONFIG)
  draft = testing.random_model(dataclasses.replace(CONFIG, num_layers=1))
  tree = ss.TreeConfig(num_nodes=4, width=2, num_draft_steps=2, branching=2)
  requests = requests_of(3, longest_prompt=40, max_new_tokens=24)
  plain, drafted = (
    decoding_cases.run(decoder, requests)
    for decoder in (ss.Decoder(target), ss.Decoder(target, draft, tree=tree))
  )
  assert_same(drafted, plain)


def test_no_weights_travel_between_devices():
  config = dataclasses.replace(CONFIG, vocab_size=512)
  text = step_text(testing.random_model(config, devices=jax.devices()[:2]))
  assert not re.findall(r'= s8\S* all-gather(?:-start)?\(', text)
  # After both blocks of both layers, the scales' and the product's.
  assert len(re.findall(r'= s32\S* all-reduce(?:-start)?\(', text)) == 4


def test_abstract_parameters_are_those_of_the_model():
  model = testing.random_model(CONFIG)
  abstract = params_lib.abstract_params(CONFIG, jnp.float32, model.mesh)
  assert jax.tree.structure(abstract) == jax.tree.structure(model.params)
  for want, leaf in zip(
    jax.tree.leaves(abstract), jax.tree.leaves(model.params), strict=True
  ):
    assert (want.shape, want.dtype) == (leaf.shape, leaf.dtype)
