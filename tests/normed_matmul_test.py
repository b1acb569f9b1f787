"""Sum, norm and product with a quantized weight, interpreted; in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import implementations

from kernels_pallas.normed_matmul import api, pallas_gpu, reference
from swiftspec_jax import sharding

IMPLEMENTATIONS = implementations(
  'normed_matmul',
  # For three chunks: one has nothing to do.
  pallas_gpu=pallas_gpu.Config(block_outputs=16, num_splits=4),
)
IMPLEMENTATIONS['no_splits'] = functools.partial(
  IMPLEMENTATIONS['pallas_gpu'],
  config=pallas_gpu.Config(block_outputs=16, num_splits=1),
)
NUM_INPUTS, NUM_OUTPUTS, EPSILON = 192, 144, 1e-3
# Of the largest number, as in `quantized_matmul`.
TOLERANCES = reference.TOLERANCES


def arguments(dtype, weight_dtype, num_groups):
  random = np.random.default_rng(0)
  rows = random.normal(size=(2, 5, NUM_INPUTS)) * [[1], [9], [0], [0.01], [1]]
  values = random.integers(-8, 8, (2, NUM_INPUTS, NUM_OUTPUTS))
  scales = random.uniform(0.01, 1, (2, num_groups, NUM_OUTPUTS))
  return (
    *rows.astype(jnp.dtype(dtype)),
    random.uniform(0.5, 2, NUM_INPUTS).astype(np.float32),
    values.astype(jnp.dtype(weight_dtype)),
    scales.astype(np.float32),
  )


def oracle(x, added, norm_scale, values, scales):
  """The sum as it is rounded, and the product of its norm."""
  total = (x + added).astype(np.float64)
  mean = (total * total).mean(axis=1, keepdims=True)
  normed = total / np.sqrt(mean + EPSILON) * np.asarray(norm_scale)
  group = NUM_INPUTS // scales.shape[1]
  weight = np.asarray(values, np.float64)
  weight = weight * np.repeat(np.asarray(scales, np.float64), group, axis=1)
  return total, np.einsum('tk,pkn->tpn', normed, weight)


@pytest.mark.parametrize('activation', [None, 'silu'])
@pytest.mark.parametrize(
  ('dtype', 'weight_dtype', 'num_groups'),
  [('float32', 'int4', 3), ('bfloat16', 'int8', 1)],
)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_equals_oracle(name, dtype, weight_dtype, num_groups, activation):
  """With a row of zeros, which has no length."""
  arrays = arguments(dtype, weight_dtype, num_groups)
  call = functools.partial(
    IMPLEMENTATIONS[name], epsilon=EPSILON, activation=activation
  )
  total, product = jax.jit(call)(*arrays)
  want_total, want = oracle(*arrays)
  if activation:
    gate, up = np.moveaxis(want, 1, 0)
    want = (gate / (1 + np.exp(-gate)) * up)[:, None]
  np.testing.assert_array_equal(np.asarray(total, np.float32), want_total)
  assert product.dtype == dtype
  error = abs(np.asarray(product, np.float32) - want)
  assert error.max() <= TOLERANCES[dtype] * abs(want).max()


@pytest.mark.parametrize('implementation', ['auto', 'pallas_gpu'])
def test_devices_share_the_outputs(implementation, monkeypatch):
  kernel = functools.partial(pallas_gpu.normed_matmul, interpret=True)
  monkeypatch.setattr(pallas_gpu, 'normed_matmul', kernel)
  mesh = sharding.make_mesh(jax.devices()[:3])
  on_mesh = sharding.sharding_of(mesh, (None, None, 'ffw'))
  arrays = arguments('float32', 'int4', 3)
  call = functools.partial(
    api.normed_matmul,
    epsilon=EPSILON,
    implementation=implementation,
    sharding=on_mesh,
  )
  got = jax.jit(call)(*arrays)
  for x, want in zip(got, oracle(*arrays), strict=True):
    np.testing.assert_allclose(x, want, atol=1e-5 * abs(want).max())
