"""Matrices that lie transposed on CPUs are the same matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_cases import CONFIG

from swiftspec_jax import testing
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.models.matrices.transposed import TransposedMatrix
from swiftspec_jax.models.param_specs import ParamSpec
from swiftspec_jax.runtime import sharding

ARRAY = np.random.default_rng(0).standard_normal((2, 12, 3, 5), np.float32)
AXES = ('kv_heads', None, None, None)


@pytest.mark.parametrize('num_devices', [1, 2])
@pytest.mark.parametrize('num_rows', [1, 8, 65])
def test_products_are_those_of_the_array(num_devices, num_rows):
  mesh = sharding.make_mesh(jax.devices()[:num_devices])
  spec = ParamSpec(ARRAY.shape, ARRAY.shape, AXES, 1.0, num_in_axes=2)
  matrix = transposed.place(ARRAY.__getitem__, spec, mesh, ARRAY.dtype)
  assert matrix.values.shape == (3, 5, 24)
  rows = np.random.default_rng(1).standard_normal((num_rows, 24), np.float32)
  product = jax.jit(TransposedMatrix.multiply)(
    matrix, sharding.replicate(rows, mesh)
  )
  expected = np.tensordot(rows, ARRAY.reshape(24, 3, 5).astype(np.float64), 1)
  np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(matrix.to_array(), ARRAY)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_layers_on_a_cpu_have_them(dtype):
  layer = testing.random_model(CONFIG, dtype=dtype).params['layers'][0]
  for name in ('qkv', 'attention_out', 'gate_up', 'down'):
    assert isinstance(layer[name], TransposedMatrix)
    assert layer[name].values.dtype == dtype
  assert transposed.undone(layer)['gate_up'].shape == (32, 2, 64)
