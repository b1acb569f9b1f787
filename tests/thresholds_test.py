"""One test body for all implementations of top-k and top-p.

The kernels run in their interpreters; they must decide as the oracle does, bit
for bit, which sorts and adds up in Python's own integers. That the integers
stand for probabilities is checked in float64.
"""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from interpreters import implementations

from kernels_pallas.thresholds import exact, pallas_gpu, pallas_tpu

pytestmark = pytest.mark.usefixtures('no_races')

VOCAB = 1300  # neither of whole tiles of 1024 nor of 256 tokens
IMPLEMENTATIONS = implementations(
  'find_thresholds',
  pallas_tpu=pallas_tpu.Config(block_vocab=1024, width=128),
  pallas_gpu=pallas_gpu.Config(block_vocab=256),
)
COMPILED = {name: jax.jit(call) for name, call in IMPLEMENTATIONS.items()}
ALL = math.inf


jitted_weights_of = jax.jit(exact.weights_of)


def weights_of(row):
  return np.asarray(jitted_weights_of(row, np.full_like(row, row.max())))


def oracle(row, top_k, top_p):
  """The least logit that stays, of logits f32[V]."""
  if top_k is not None and top_k <= len(row):
    kth = np.sort(row)[len(row) - top_k]
  else:
    kth = -np.inf
  if top_p is None or top_p == ALL:
    return kth
  pairs = zip(row, weights_of(row).tolist(), strict=True)
  kept = sorted((pair for pair in pairs if pair[0] >= kth), reverse=True)
  goal = np.float32(top_p) * np.float32(sum(w for _, w in kept))
  total = 0
  for logit, weight in kept:
    total += weight
    if np.float32(total) >= goal:
      return logit
  raise AssertionError('the sum is less than its share')


def check(name, logits, top_ks, top_ps):
  arrays = [
    None if x is None else np.asarray(x, dtype)
    for x, dtype in ((top_ks, np.int32), (top_ps, np.float32))
  ]
  got = np.asarray(COMPILED[name](logits, *arrays))
  for b, row in enumerate(logits):
    for t, query in enumerate(row):
      top_k = None if top_ks is None else top_ks[b]
      top_p = None if top_ps is None else top_ps[b]
      assert got[b, t] == oracle(query, top_k, top_p), (b, t)


def random_logits(seed, shape, step):
  """Logits in steps, so that some are equal; a few are excluded."""
  random = np.random.default_rng(seed)
  logits = random.normal(size=shape) * random.choice([0.1, 1, 5])
  logits = (logits / step).round() * step
  logits[random.random(shape) < 0.1] = -np.inf
  logits[..., 7] = 0.5  # not all are
  return logits.astype(np.float32)


TOP_KS = st.sampled_from([1, 2, 50, VOCAB, VOCAB + 5])
TOP_PS = st.one_of(
  st.sampled_from([1e-9, 0.5, 0.9, 0.999999, ALL]), st.floats(1e-3, 1)
)


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  step=st.sampled_from([1e-4, 0.25]),
  top_ks=st.tuples(TOP_KS, TOP_KS),
  top_ps=st.tuples(TOP_PS, TOP_PS),
)
@hypothesis.settings(max_examples=3)
def test_any_row(name, seed, step, top_ks, top_ps):
  check(name, random_logits(seed, (2, 2, VOCAB), step), top_ks, top_ps)


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
@pytest.mark.parametrize('limits', [([3, 200], None), (None, [0.4, 0.97])])
def test_one_of_both(name, limits):
  check(name, random_logits(1, (2, 1, VOCAB), 0.25), *limits)


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_edges(name):
  rows = np.zeros((5, 1, VOCAB), np.float32)  # the first: all are equal
  rows[1] = -np.inf  # all but one are excluded
  rows[1, 0, 1299] = -3
  rows[2, 0] = np.linspace(-3e38, 3e38, VOCAB)  # differences overflow
  rows[3, 0] = np.repeat(np.float32([-0.0, 1e-40, 1, 80]), VOCAB // 4)
  rows[4] = -90  # below what counts
  rows[4, 0, 1023:1025] = 5
  for top_k in (1, 2, VOCAB):
    check(name, rows, [top_k] * 5, [0.5, ALL, 0.3, 1e-30, 0.999])


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_padding_does_not_leak(name):
  """Rows do not depend on the others, whatever these hold."""
  logits = random_logits(3, (2, 2, VOCAB), 1e-4)
  limits = np.full(2, 90, np.int32), np.full(2, 0.8, np.float32)
  clean = np.asarray(COMPILED[name](logits, *limits))
  logits[1, 1] = np.nan
  spoiled = np.asarray(COMPILED[name](logits, *limits))
  np.testing.assert_array_equal(spoiled[0], clean[0])
  np.testing.assert_array_equal(spoiled[1, 0], clean[1, 0])


def test_weights_are_probabilities():
  below = np.float32(np.random.default_rng(0).uniform(0, 25, 100_000))
  below[:3] = [0, 21, np.inf]
  got = np.asarray(jitted_weights_of(-below, np.zeros_like(below)))
  want = 2.0**30 * np.exp(-below.astype(np.float64))
  assert (abs(got - want) <= 2e-5 * want + 1).all()
  assert got[:3].tolist() == [2**30, got[1], 0]


def test_sums_are_exact():
  """The largest that a vocabulary can have, and its neighbour."""
  weights = np.full((2, 2**15, 16), 2**30)
  weights[1, 0, 0] -= 2**8

  @jax.jit
  def add_up(weights):
    high, low = (x.sum(axis=2) for x in exact.limbs_of(weights))
    return exact.add_up(high, low, (1,), keepdims=False)

  got = add_up(weights.astype(np.int32))
  assert got.tolist() == np.float32(weights.sum((1, 2))).tolist()


@pytest.mark.parametrize('backend', [pallas_tpu, pallas_gpu])
def test_what_kernels_cannot_do(backend):
  with pytest.raises(NotImplementedError, match='bfloat16 is not float32'):
    backend.check(jax.ShapeDtypeStruct((1, 1, 8), jnp.bfloat16))
  with pytest.raises(NotImplementedError, match='600000 tokens are more'):
    backend.check(jax.ShapeDtypeStruct((1, 1, 600_000), jnp.float32))
