"""Products are the same on all platforms, up to one rounding."""

import dataclasses
import functools
import re

import decoding_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import int8_products, products
from swiftspec_jax.config.architecture import Experts
from swiftspec_jax.models import decoder
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.cache import dense
from swiftspec_jax.runtime import sharding

KEY = jax.random.key(0)
# bfloat16 keeps 8 bits: half of the last one, of sums of numbers near 1.
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2.0**-8}


def draw(shape, dtype):
  return jax.random.normal(jax.random.fold_in(KEY, sum(shape)), shape, dtype)


def assert_rounded_once(actual, exact, dtype):
  assert actual.shape == exact.shape
  np.testing.assert_allclose(
    np.asarray(actual, np.float64), exact, TOLERANCES[dtype], atol=1e-4
  )


@pytest.mark.parametrize('dtype', TOLERANCES)
@pytest.mark.parametrize('num_rows', [1, 2, 8])
def test_products_are_rounded_once(dtype, num_rows):
  rows, weight = draw((num_rows, 24), dtype), draw((24, 3, 5), dtype)
  table = draw((50, 24), dtype)
  exact = [np.asarray(x, np.float64) for x in (rows, weight, table)]
  product = jax.jit(products.multiply)(rows, weight)
  assert product.dtype == dtype
  assert_rounded_once(product, np.tensordot(exact[0], exact[1], 1), dtype)
  scores = jax.jit(products.look_up_scores)(rows, table)
  assert scores.dtype == jnp.float32
  assert_rounded_once(scores, exact[0] @ exact[2].T, jnp.float32)
  product = jax.jit(lambda x, y: products.einsum('nk,vk->nv', x, y))(
    rows, table
  )
  assert product.dtype == dtype
  assert_rounded_once(product, exact[0] @ exact[2].T, dtype)


@pytest.mark.parametrize('num_outputs', [(5,), (2, 5), (3, 2, 5)])
@pytest.mark.parametrize('num_rows', [2, 70])
def test_transposed_weights_give_the_same(num_rows, num_outputs):
  """Few rows and many are multiplied in forms of their own."""
  rng = np.random.default_rng(0)
  rows, weight = (
    rng.integers(-127, 128, (*size, 24), np.int8)
    for size in ((num_rows,), num_outputs)
  )
  exact = np.einsum('nk,...k->n...', rows.astype(int), weight.astype(int))
  product = jax.jit(int8_products.multiply)(rows, weight)
  np.testing.assert_array_equal(product, exact)
  # Of integers that float32 holds exactly, like their sums.
  rows, weight = rows.astype(np.float32), weight.astype(np.float32)
  product = jax.jit(products.multiply_transposed)(rows, weight)
  np.testing.assert_array_equal(product, exact)


@pytest.mark.parametrize('num_rows', [1, 8])
def test_gradients_are_those_of_the_plain_product(num_rows):
  rows, weight = draw((num_rows, 24), jnp.bfloat16), draw((24, 7), jnp.bfloat16)

  def total(multiply):
    return lambda *args: multiply(*args).astype(jnp.float32).sum()

  actual = jax.grad(total(products.multiply), (0, 1))(rows, weight)
  expected = jax.grad(total(jnp.dot), (0, 1))(rows, weight)
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(
      np.asarray(a, np.float32), np.asarray(b, np.float32), 2e-2, 2e-2
    )


@pytest.mark.parametrize('dtype', TOLERANCES)
@pytest.mark.parametrize('indices', [[[3, 0, 3], [49, 7, 0]], [[7]]])
def test_rows_are_taken_as_they_are(dtype, indices):
  table, indices = draw((50, 24), dtype), jnp.array(indices)
  taken = jax.jit(products.take_rows)(table, indices)
  np.testing.assert_array_equal(taken, np.asarray(table)[indices])
  gradient = jax.grad(
    lambda table: products.take_rows(table, indices).astype(jnp.float32).sum()
  )(table)
  counts = np.bincount(np.asarray(indices).ravel(), minlength=50)
  expected = np.broadcast_to(counts[:, None], table.shape)
  np.testing.assert_array_equal(np.asarray(gradient, np.float32), expected)


@functools.partial(jax.jit, static_argnames='config')
def scores_of(params, config, token_ids, cache):
  hidden, _ = decoder.forward(
    params, config, token_ids, cache, starts=jnp.zeros(1, jnp.int32)
  )
  return decoder.unembed(params, config, hidden)


@pytest.mark.parametrize(
  ('platform', 'dtype', 'weight_dtype'),
  [
    ('cuda', jnp.float32, None),
    ('cuda', jnp.float32, 'int4'),
    ('tpu', jnp.float32, None),
    ('tpu', jnp.bfloat16, None),
  ],
)
def test_accelerators_keep_all_bits_of_float32(platform, dtype, weight_dtype):
  """Those of attention, of experts and of the vocabulary, too."""
  config = dataclasses.replace(
    decoding_cases.CONFIG,
    experts=Experts(num_experts=2, num_active=1, ffw_dim=32),
    weight_dtype=weight_dtype,
    kernels='reference',  # not those of the CPU that traces
  )
  mesh = sharding.make_mesh(jax.devices()[:1])
  lowered = scores_of.trace(
    params_lib.abstract_params(config, dtype, mesh),
    config,
    jax.ShapeDtypeStruct((1, 8), jnp.int32),
    jax.eval_shape(lambda: dense.init(config, 1, 64, dtype, mesh)),
  ).lower(lowering_platforms=(platform,))
  found = re.findall(r'dot.*precision\S* = (.*?)\]', lowered.as_text())
  # Of a layer: qkv, scores, attended, out, router, gate, up and down.
  assert len(found) == 9
  num_exact = sum(precision.count('HIGHEST') == 2 for precision in found)
  assert num_exact == (9 if dtype == jnp.float32 else 0)
