"""One test body for all implementations of rejection sampling on a chain.

The kernels run in their interpreters. The distribution of what is drawn is
tested in verification_test.py; here an oracle in float64 counts.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from interpreters import interpret_tpu

from kernels_pallas import dispatch
from kernels_pallas.rejection import api, pallas_gpu, pallas_tpu, reference

pytestmark = pytest.mark.usefixtures('no_races')

NUM_PLACES = 6
VOCAB = 300  # neither of whole tiles of 128 nor of 32 tokens
IMPLEMENTATIONS = {
  'reference': reference.accept_chain,
  'pallas_tpu': functools.partial(
    pallas_tpu.accept_chain,
    config=pallas_tpu.Config(block_vocab=128),
    interpret=interpret_tpu(),
  ),
  'pallas_gpu': functools.partial(
    pallas_gpu.accept_chain,
    config=pallas_gpu.Config(block_vocab=32, num_programs=4),
    interpret=True,
  ),
}
# Of a logarithm: 300 roundings in float32, and those of exp and log.
TOLERANCE = 1e-5


@functools.cache
def compiled(name):
  return jax.jit(IMPLEMENTATIONS[name])


def oracle(law, token_ids, bars):
  """Of a row: the tokens that stand, and the normalisers."""
  law = law.astype(np.float64)
  highest = law.max(axis=1)
  normalisers = highest + np.log(np.exp(law - highest[:, None]).sum(axis=1))
  count = 0
  while bars[count] < np.exp(law[count, token_ids[count]] - normalisers[count]):
    count += 1
  return count, normalisers


def arguments(seed, num_drafted, width, share_excluded):
  """Distributions, tokens, and bars on both sides of their probabilities."""
  random = np.random.default_rng(seed)
  shape = (len(num_drafted), NUM_PLACES)
  law = (width * random.normal(size=(*shape, VOCAB))).astype(np.float32)
  law[random.random(law.shape) < share_excluded] = -np.inf
  law[..., 7] = 0.5  # not all are
  token_ids = random.integers(0, VOCAB, shape).astype(np.int32)
  probs = np.asarray(jax.nn.softmax(law, axis=-1))
  drafted = np.take_along_axis(probs, token_ids[:, :, None], axis=2)[:, :, 0]
  # Rarely above: most tokens stand. Never within rounding.
  bars = drafted * np.where(random.random(shape) < 0.2, 1.01, 0.99)
  is_drafted = np.arange(NUM_PLACES)[None] < np.asarray(num_drafted)[:, None]
  bars = np.where(is_drafted, bars, np.inf).astype(np.float32)
  return law, token_ids, bars


def check(name, law, token_ids, bars):
  counts, normalisers = map(
    np.asarray, compiled(name)(*map(jnp.asarray, (law, token_ids, bars)))
  )
  for b in range(len(law)):
    count, expected = oracle(law[b], token_ids[b], bars[b])
    assert counts[b] == count
    np.testing.assert_allclose(normalisers[b], expected, atol=TOLERANCE)


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  num_drafted=st.lists(st.integers(0, NUM_PLACES - 1), min_size=3, max_size=3),
  width=st.sampled_from([0.1, 1, 10]),
  share_excluded=st.sampled_from([0.0, 0.9]),
)
@hypothesis.settings(max_examples=15)
def test_any_chain(name, seed, num_drafted, width, share_excluded):
  check(name, *arguments(seed, num_drafted, width, share_excluded))


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_edges(name):
  """Whole tiles that are excluded, greedy distributions, tokens at the ends."""
  law = np.full((3, NUM_PLACES, VOCAB), -np.inf, np.float32)
  law[0, :, 299] = 0  # one token is certain
  law[1, :, 130] = law[1, :, 0] = 80  # an even choice; exp(80) is too large
  law[2] = -1e30  # all are equal
  token_ids = np.full((3, NUM_PLACES), 299, np.int32)
  token_ids[1] = [0, 130, 0, 0, 0, 0]
  bars = np.full((3, NUM_PLACES), np.inf, np.float32)
  bars[0, :5] = [0.999, 0, 0.5, 1, 0]  # 1 is not larger than 1
  bars[1, :4] = [0.49, 0, 0.49, 0.51]
  bars[2, :5] = [0.9 / VOCAB, 1.1 / VOCAB, 0, 0, 0]
  check(name, law, token_ids, bars)
  # A token that cannot be is never accepted, however low its bar.
  token_ids[:2] = 5
  check(name, law[:2], token_ids[:2], np.where(bars[:2] < 9, 0, bars[:2]))


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_padding_does_not_leak(name):
  """Rows do not depend on the others, nor on places behind their drafts."""
  law, token_ids, bars = arguments(3, [2, 4], 1, 0.0)
  count, normalisers = compiled(name)(law, token_ids, bars)
  law[1] = np.nan
  law[0, 3:] = np.nan
  token_ids[0, 2:] = -1
  spoiled_count, spoiled = compiled(name)(law, token_ids, bars)
  assert spoiled_count[0] == count[0]
  np.testing.assert_array_equal(spoiled[0, :3], normalisers[0, :3])


def test_choice_and_reason_can_be_read():
  api.accept_chain(*arguments(1, [2], 1, 0.0))
  newest = [c for c in dispatch.choices() if c.kernel == 'accept_chain'][-1]
  assert newest.implementation == 'reference'
  shape = f'float32[1, {NUM_PLACES}, {VOCAB}]'
  assert newest.shape == f'law {shape} on 1 devices'
