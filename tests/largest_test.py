"""The largest numbers of blocks are those of the whole."""

import jax
import numpy as np
import pytest

from kernels_pallas.vocabulary import largest


@pytest.mark.parametrize('size', [100, 512, 2048])
@pytest.mark.parametrize('num_values', [1, 3, 10**6])
def test_finds_what_plain_jax_does(num_values, size):
  """With few different values, most are ties."""
  values = np.random.default_rng(0).integers(num_values, size=(2, 3, size))
  values = values.astype(np.float32)
  values[0, 1, 70:] = -np.inf
  values[1, 2, 99] = np.nan
  assert np.array_equal(largest.argmax(values), values.argmax(axis=-1))
  numbers = np.nan_to_num(values)
  for found, wanted in zip(
    largest.top_k(numbers, 8), jax.lax.top_k(numbers, 8), strict=True
  ):
    assert np.array_equal(found, wanted)
