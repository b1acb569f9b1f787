"""Any sequence of write and commit equals a prefill from scratch."""

import dataclasses

import decoding_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention import reference as paged_reference
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.models import decoder
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.cache import dense, paged
from swiftspec_jax.runtime import sharding

CONFIG = dataclasses.replace(decoding_cases.CONFIG, num_layers=2)
BATCH = 2
CAPACITY = 48
NUM_NODES = 4  # tokens of one write
LIMIT = 40  # committed tokens; after them lie scratch rows
PARAMS = params_lib.random_params(jax.random.key(0), CONFIG)


def new_cache(batch_size=BATCH):
  mesh = sharding.make_mesh(None)
  return dense.init(CONFIG, batch_size, CAPACITY, jnp.float32, mesh)


@jax.jit
def write_tree(cache, token_ids, parents, depths):
  """Writes trees of NUM_NODES tokens after the prefix."""
  mask = tree_lib.ancestor_mask(parents)
  _, cache = decoder.forward(
    PARAMS,
    CONFIG,
    token_ids,
    cache,
    starts=cache.kv_lengths,
    positions=cache.kv_lengths[:, None] + depths,
    attention_mask=mask,
  )
  return cache


@jax.jit
def prefill(token_ids):
  _, cache = decoder.forward(
    PARAMS, CONFIG, token_ids, new_cache(1), starts=jnp.zeros(1, jnp.int32)
  )
  return cache


commit = jax.jit(dense.commit)


def path_to(node, parents):
  path = []
  while node >= 0:
    path.append(node)
    node = parents[node]
  return path[::-1]


@st.composite
def operations(draw):
  """Trees to write in each row with the node to keep."""
  rows = []
  for _ in range(BATCH):
    parents = [-1]
    for node in range(1, NUM_NODES):
      parents.append(draw(st.integers(-1, node - 1)))
    token_ids = [draw(st.integers(0, 31)) for _ in range(NUM_NODES)]
    rows.append((token_ids, parents, draw(st.integers(-1, NUM_NODES - 1))))
  return rows


@settings(max_examples=15)
@given(st.lists(operations(), min_size=1, max_size=8))
def test_any_sequence_equals_prefill(sequence):
  cache = new_cache()
  known = [[] for _ in range(BATCH)]
  for rows in sequence:
    token_ids, parents, kept = zip(*rows, strict=True)
    depths = [
      [len(path_to(node, p)) - 1 for node in range(NUM_NODES)] for p in parents
    ]
    cache = write_tree(cache, *map(jnp.asarray, (token_ids, parents, depths)))
    paths = [path_to(n, p) for n, p in zip(kept, parents, strict=True)]
    paths = [
      p if len(k) + len(p) <= LIMIT else []
      for p, k in zip(paths, known, strict=True)
    ]
    padded = [p + [0] * (NUM_NODES - len(p)) for p in paths]
    cache = commit(
      cache,
      jnp.asarray(padded),
      jnp.asarray([len(p) for p in paths], jnp.int32),
    )
    for k, ids, path in zip(known, token_ids, paths, strict=True):
      k += [ids[node] for node in path]
  for row, expected in enumerate(known):
    assert cache.kv_lengths[row] == len(expected)
    padded = jnp.asarray([expected + [0] * (LIMIT - len(expected))])
    reference = prefill(padded)
    for got, want in zip(
      cache.keys + cache.values, reference.keys + reference.values, strict=True
    ):
      np.testing.assert_allclose(
        got[row, :, : len(expected)], want[0, :, : len(expected)], atol=2e-5
      )


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_pages_give_back_what_was_written(dtype):
  """On CPUs pages hold the numbers of bfloat16 as float32."""
  shape = (3, CONFIG.num_kv_heads, CONFIG.head_dim)
  new = jax.random.normal(jax.random.key(0), shape).astype(dtype)
  cache = paged.init(CONFIG, 4, 2, dtype, sharding.make_mesh(None))
  pages = paged.write(cache.keys[0], new, jnp.array([6, 7, 2]))
  assert pages.dtype == 'float32'
  found = paged_reference.read_pages(
    pages, jnp.array([[3, 1]]), CONFIG.num_kv_heads, cache.dtype
  )
  assert found.dtype == dtype
  expected = np.moveaxis(np.asarray(new), 1, 0)[None]
  np.testing.assert_array_equal(found[:, :, :3], expected)
