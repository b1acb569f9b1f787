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
    jax.jit(largest.top_k, static_argnums=1)(numbers, 8),
    jax.lax.top_k(numbers, 8),
    strict=True,
  ):
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize('size', [100, 512])
def test_log_probs_are_those_of_a_softmax(size):
  logits = 50 * np.random.default_rng(1).normal(size=(2, 3, size))
  logits[1, 0, 70:] = -np.inf
  log_probs, indices = largest.top_log_probs(logits.astype(np.float32), 8)
  wanted = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  wanted = np.take_along_axis(wanted, np.asarray(indices), axis=-1)
  np.testing.assert_allclose(log_probs, wanted, rtol=1e-5, atol=1e-5)
