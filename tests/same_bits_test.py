"""On one CPU the logits of a token have the same bits in any company.

It may be alone, in a chain, in a tree with any other nodes between, in a batch.
So speculative outputs equal plain ones in every dtype, not only where rounding
happens to hide the order of sums.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder

CONFIG = ModelConfig(
  family='llama',
  vocab_size=263,
  num_layers=2,
  embed_dim=40,
  num_heads=6,
  num_kv_heads=2,
  head_dim=16,
  ffw_dim=72,
  max_context=128,
  tie_embeddings=True,
)
NUM_KNOWN, NUM_NEW, NUM_NODES = 21, 4, 9
DTYPES = {
  'float32': (jnp.float32, None),
  'bfloat16': (jnp.bfloat16, None),
  'int8_dynamic': (jnp.float32, 'int8_dynamic'),
  'int8_dynamic16': (jnp.bfloat16, 'int8_dynamic16'),
}
OF_FILES = {**DTYPES, 'stored': (jnp.float32, 'stored')}


def random_tree(rng, places):
  """Returns bool[T, T] and depths of a tree with a chain at some places."""
  mask = np.eye(NUM_NODES, dtype=bool)
  for node in range(1, NUM_NODES):
    parent = rng.integers(node)
    if node in places:
      parent = places[list(places).index(node) - 1]
    mask[node] |= mask[parent]
  return mask, mask.sum(axis=1) - 1


def check(model, seed):
  """Compares logits of a chain that is fed in several ways."""
  rng = np.random.default_rng(seed)
  known, chain, others = (
    rng.integers(model.config.vocab_size, size=size, dtype=np.int32)
    for size in (NUM_KNOWN, NUM_NEW, NUM_NODES)
  )

  @functools.partial(jax.jit, static_argnames='context')
  def run(params, tokens, cache, **options):
    hidden, cache = decoder.forward(
      params,
      model.config,
      tokens,
      cache,
      starts=cache.kv_lengths,
      **options,
    )
    return decoder.unembed(params, model.config, hidden), cache

  sizes = dense.KVCacheConfig.of_model(
    model.config, 1, NUM_KNOWN + NUM_NODES, model.dtype
  )
  _, read = run(
    model.params, known[None], sizes.init(model.mesh), context=NUM_KNOWN
  )

  def filled(batch_size):
    # Prompts are XLA's: the same one, as it may differ with those beside it.
    keys, values = jax.tree.map(
      lambda x: jnp.repeat(x, batch_size, axis=0), (read.keys, read.values)
    )
    lengths = jnp.full(batch_size, NUM_KNOWN, jnp.int32)
    return read.replace(keys=keys, values=values, kv_lengths=lengths)

  want, cache = [], filled(1)
  for token in chain:
    logits, cache = run(model.params, token[None, None], cache)
    cache = cache.replace(kv_lengths=cache.kv_lengths + 1)
    want.append(np.asarray(logits)[0, 0])
  logits, _ = run(model.params, chain[None], filled(1))
  np.testing.assert_array_equal(logits[0], want)
  for batch_size in (1, 3):
    places = [0, *np.sort(rng.permutation(np.arange(1, NUM_NODES))[:3])]
    mask, depths = random_tree(rng, places)
    nodes = others.copy()
    nodes[places] = chain

    def copies(x, batch_size=batch_size):
      return np.tile(x[None], (batch_size, *[1] * x.ndim))

    logits, _ = run(
      model.params,
      copies(nodes),
      filled(batch_size),
      positions=copies((NUM_KNOWN + depths).astype(np.int32)),
      attention_mask=copies(mask),
    )
    np.testing.assert_array_equal(np.asarray(logits)[-1, places], want)


@pytest.mark.parametrize('name', DTYPES)
def test_of_a_tiny_model(name):
  dtype, weight_dtype = DTYPES[name]
  config = dataclasses.replace(CONFIG, weight_dtype=weight_dtype)
  check(testing.random_model(config, dtype=dtype), seed=0)


@pytest.mark.optimised
@pytest.mark.parametrize('name', OF_FILES)
def test_of_a_real_model(name):
  dtype, weight_dtype = OF_FILES[name]
  model = ss.load(
    'smollm2-135m-instruct',
    dtype=dtype,
    weight_dtype=weight_dtype,
    devices=jax.devices()[:1],
    kernels='native',
  )
  check(model, seed=1)
