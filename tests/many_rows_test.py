"""Sums over products of more than 2**15 rows.

On CPUs jax 0.10.2 gets an entry of some of them wrong, and says nothing
(jax-ml/jax#39103). These are the ones that training and `scoring` compute.
"""

import dataclasses

import decoding_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import products
from swiftspec_jax.distillation import losses, student, training
from swiftspec_jax.models import params as params_lib

VOCAB = 64
CONFIG = dataclasses.replace(
  decoding_cases.CONFIG, vocab_size=VOCAB, tie_embeddings=False
)
TRAINING = training.TrainingConfig(
  student=student.StudentConfig(num_layers=1), loss=losses.LossWeights()
)


@pytest.mark.parametrize('num_rows', [2**15 + 1, 70_001])
def test_log_probs_and_their_gradient(num_rows):
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((num_rows, 16))
  table = rng.standard_normal((VOCAB, 16))
  probs = np.exp(hidden @ table.T)
  sums = probs.sum(axis=1)
  probs /= sums[:, None]

  def total(hidden, table):
    logits = products.look_up_scores(hidden, table)
    normalisers = jax.nn.logsumexp(logits, axis=1)
    return normalisers.sum(), normalisers

  run = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
  arrays = (jnp.asarray(x, jnp.float32) for x in (hidden, table))
  (of_hidden, of_table), normalisers = run(*arrays)
  np.testing.assert_allclose(normalisers, np.log(sums), atol=1e-4)
  np.testing.assert_allclose(of_hidden, probs @ table, atol=1e-4)
  np.testing.assert_allclose(of_table, probs.T @ hidden, rtol=1e-3, atol=0.1)


def test_losses_at_many_places():
  """Four times the same rows have four times the same losses."""
  rng = np.random.default_rng(0)
  shape = (257, 32)
  order = np.broadcast_to(np.arange(32, dtype=np.int32), shape)
  distributions = np.sort(rng.dirichlet(np.ones(5), shape))[..., :0:-1]
  quarter = {
    'token_ids': rng.integers(0, VOCAB, shape).astype(np.int32),
    'positions': order,
    'pieces': np.ones(shape, np.int32),
    'branches': np.zeros(shape, np.int32),
    'previous': order - 1,
    'places': order,
    'top_outputs': rng.integers(0, VOCAB, (*shape, 4)).astype(np.int32),
    'top_log_probs': np.log(distributions).astype(np.float32),
  }
  params = params_lib.random_params(jax.random.key(0), CONFIG)

  def measure(batch):
    return training.measure(
      params, {}, batch, config=TRAINING, model_config=CONFIG
    )

  want = measure(quarter)
  got = measure({k: np.concatenate([v] * 4) for k, v in quarter.items()})
  assert got['kl'].size > 2**15
  for name, values in want.items():
    np.testing.assert_allclose(
      got[name], np.concatenate([values] * 4), atol=1e-4, err_msg=name
    )
