"""Matrices of layers lie transposed on CPUs."""

import jax.numpy as jnp
import pytest
from decoding_cases import CONFIG

from swiftspec_jax import testing
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.models.matrices.transposed import TransposedMatrix


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_layers_on_a_cpu_have_them(dtype):
  layer = testing.random_model(CONFIG, dtype=dtype).params['layers'][0]
  for name in ('qkv', 'attention_out', 'gate_up', 'down'):
    assert isinstance(layer[name], TransposedMatrix)
    assert layer[name].values.dtype == dtype
  assert transposed.undone(layer)['gate_up'].shape == (32, 2, 64)
