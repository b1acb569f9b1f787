"""Rotation, write and attention in one launch, interpreted; oracle in numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import paged_attention_test as paged
import pytest
import tree_attention_test as tree_attention
from attention_oracle import ancestor_mask, assert_close, oracle
from interpreters import implementations

from kernels_pallas.fused_attention import api, native, pallas_gpu, reference
from kernels_pallas.fused_paged_attention import api as paged_api
from kernels_pallas.fused_paged_attention import pallas_gpu as paged_gpu
from kernels_pallas.fused_paged_attention import reference as paged_reference
from kernels_pallas.kv_commit import native as commit_native
from swiftspec_jax.runtime import sharding as sharding_lib

IMPLEMENTATIONS = implementations(
  'fused_attention', pallas_gpu=pallas_gpu.Config(block_kv=32, num_splits=3)
)


Case = functools.partial(tree_attention.Case, head_dim=32, capacity=96)
CASES = {
  # Rows that begin, end and lie at the edge of a block; an empty prefix.
  'edges': Case(prefix_lengths=(0, 27, 32, 60)),
  'one_token': Case(prefix_lengths=(31, 50), num_tokens=1, tree_size=1),
  'grown_tree': Case(prefix_lengths=(3, 29), tree_size=40),
  'window': Case(prefix_lengths=(9, 64), window=7),
  'bfloat16': Case(prefix_lengths=(33,), dtype='bfloat16'),
}


def arguments(case):
  """The new tokens are the last rows of the tree; what they replace is NaN."""
  random = np.random.default_rng(0)
  batch, tokens = len(case.prefix_lengths), case.num_tokens
  lengths = np.int32(case.prefix_lengths)
  starts = lengths + case.tree_size - tokens
  shape = (batch, tokens, case.num_kv_heads, case.num_groups + 2, case.head_dim)
  heads = random.normal(size=shape)
  angles = random.uniform(0, 6, (batch, tokens, case.head_dim // 2))
  cache = random.normal(
    size=(2, batch, case.num_kv_heads, case.capacity, case.head_dim)
  )
  for row, start in enumerate(starts):
    cache[:, row, :, start : start + tokens] = np.nan
  parents = random.integers(0, 100, case.tree_size)
  masks = [ancestor_mask(parents, case.tree_size)[-tokens:]] * batch
  depths = np.sum(masks, axis=2)
  return (
    heads.astype(jnp.dtype(case.dtype)),
    np.cos(angles).astype(np.float32),
    np.sin(angles).astype(np.float32),
    *cache.astype(jnp.dtype(case.dtype)),
    starts,
    lengths,
    np.stack(masks),
    (lengths[:, None] + depths - 1).astype(np.int32),
  )


def rotated(x, cos, sin):
  """Pairs are the halves of x [B, T, ..., E]."""
  turns = np.asarray(cos) + 1j * np.asarray(sin)
  first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
  turns = turns.reshape(*turns.shape[:2], *(1,) * (x.ndim - 3), -1)
  pairs = (first + 1j * second) * turns
  return np.concatenate([pairs.real, pairs.imag], axis=-1)


def written(rows, new, starts):
  rows = np.array(rows, np.float32)
  for row, start in enumerate(np.asarray(starts)):
    rows[row, :, start : start + new.shape[1]] = np.moveaxis(new[row], 0, 1)
  return rows


def test_a_later_change_of_the_cache_copies_nothing():
  def attend_and_move(heads, cos, sin, *rest):
    attended, *cache = native.fused_attention(
      heads, cos, sin, *rest, **CASES['edges'].options
    )
    path = jnp.zeros((len(heads), 1), jnp.int32)
    return attended, commit_native.kv_commit(cache, rest[2], path, num_rows=8)

  arrays = arguments(CASES['edges'])
  program = jax.jit(attend_and_move, donate_argnums=(3, 4))
  cache_shape = ','.join(map(str, arrays[3].shape))
  text = program.lower(*arrays).compile().as_text()
  assert not re.search(rf'f32\[{cache_shape}\]\S* copy', text)


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_equals_oracle(name, case):
  case = CASES[case]
  arrays = arguments(case)
  call = functools.partial(IMPLEMENTATIONS[name], **case.options)
  attended, *cache = jax.jit(call)(*arrays)
  heads, cos, sin, keys, values, starts, *seen = arrays
  turned = rotated(heads[:, :, :, :-1], cos, sin).astype(np.float32)
  want_cache = (
    written(keys, turned[:, :, :, -1], starts),
    written(values, heads[:, :, :, -1], starts),
  )
  want = oracle(turned[:, :, :, :-1], *want_cache, *seen, **case.options)
  assert_close(attended, want, case.dtype)
  keys, values = cache
  assert_close(keys, want_cache[0], case.dtype)
  # A key may be rounded the other way.
  np.testing.assert_array_equal(np.asarray(values, np.float32), want_cache[1])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_norms_of_heads(dtype):
  rng = np.random.default_rng(0)
  heads = jnp.asarray(rng.standard_normal((2, 3, 2, 5, 24)), dtype)
  query_scale, key_scale = rng.standard_normal((2, 24)).astype(np.float32)
  got = native.norm_heads(heads, query_scale, key_scale, 1e-5)
  assert got.dtype == heads.dtype
  scales = np.stack([query_scale] * 3 + [key_scale])
  wide = np.asarray(heads, np.float64)
  keys = wide[..., :4, :]
  square = np.mean(keys**2, axis=-1, keepdims=True)
  want = keys / np.sqrt(square + 1e-5) * scales
  tolerance = {'float32': 1e-6, 'bfloat16': 1e-2, 'float16': 1e-3}[dtype]
  np.testing.assert_allclose(
    np.asarray(got[..., :4, :], np.float64), want, tolerance, tolerance
  )
  np.testing.assert_array_equal(got[..., 4, :], heads[..., 4, :])


def test_a_chain_has_no_mask(monkeypatch):
  """On each of two devices, with heads and sinks of its own."""
  kernel = functools.partial(pallas_gpu.fused_attention, interpret=True)
  monkeypatch.setattr(pallas_gpu, 'fused_attention', kernel)
  case = CASES['edges']
  *arrays, masks, positions = arguments(case)
  chain = np.tile(np.tri(case.num_tokens, dtype=bool), (len(masks), 1, 1))
  sinks = np.arange(6, dtype=np.float32)
  sinks = sinks.reshape(case.num_kv_heads, case.num_groups)
  mesh = sharding_lib.make_mesh(jax.devices()[:2])
  on_mesh = sharding_lib.sharding_of(mesh, ('batch', 'kv_heads', None, None))
  plain = functools.partial(reference.fused_attention, scale=0.1)
  want = jax.jit(plain)(*arrays, chain, positions, sinks)
  for implementation in ('auto', 'pallas_gpu'):
    call = functools.partial(
      api.fused_attention,
      scale=0.1,
      implementation=implementation,
      sharding=on_mesh,
    )
    got = jax.jit(call)(*arrays, None, positions, sinks)
    for x, y in zip(got, want, strict=True):
      np.testing.assert_allclose(x, y, atol=2e-6)


PAGED = implementations(
  'fused_paged_attention',
  pallas_gpu=paged_gpu.Config(block_kv=32, num_splits=3),
)
# The second block of each case goes on with the row of the first, from the last
# token of a page on; of some rows nothing is in the pages yet.
PAGED_CASES = {
  'chunk': paged.Case(
    prefix_lengths=(91, 96, 0, 40, 123), num_tokens=(5, 3, 4, 0, 5)
  ),
  'chunk_of_an_empty_row': paged.Case(
    prefix_lengths=(0, 5, 31), num_tokens=(5, 5, 1), num_groups=1, page_size=8
  ),
  'one_token': paged.Case(
    prefix_lengths=(0, 1, 200, 9),
    num_tokens=(1, 1, 1, 0),
    size=1,
    num_kv_heads=1,
    num_groups=4,
  ),
  'window': paged.Case(
    prefix_lengths=(27, 32, 70), num_tokens=(5, 4, 5), window=7
  ),
  'bfloat16': paged.Case(
    prefix_lengths=(28, 33, 60), num_tokens=(5, 5, 2), dtype='bfloat16'
  ),
}
SINKS = np.arange(12, dtype=np.float32).reshape(4, 3)
NUM_PADDING = 1  # tokens that no block has


def paged_arguments(case, sinks, replaced):
  """Of new tokens the last one is written nowhere."""
  random = np.random.default_rng(1)
  keys, values, table, lengths, counts, masks, positions = (
    x.copy() for x in paged.arguments(case, unseen=0.0, missing=0)[1:]
  )
  pages = np.arange(table.size).reshape(table.shape)
  pages[1] = pages[0]
  total = int(counts.sum())
  tokens = total + NUM_PADDING
  first = np.cumsum(counts) - counts
  block_tokens = np.minimum(first[:, None] + np.arange(case.size), tokens - 1)
  block_places, places = np.zeros(tokens, int), np.full(tokens, 10**6)
  for block, token in np.argwhere(np.arange(case.size) < counts[:, None]):
    row = lengths[block] + token
    n = first[block] + token
    block_places[n] = block * case.size + token
    page = pages[block, row // case.page_size]
    places[n] = page * case.page_size + row % case.page_size
    place = page, row % case.page_size
    keys[place] = values[place] = replaced
  places[total - 1] = 10**6
  heads = (tokens, case.num_kv_heads, case.num_groups + 2, case.head_dim)
  angles = random.uniform(0, 6, (tokens, case.head_dim // 2))
  dtype = jnp.dtype(case.dtype)
  before = np.zeros(len(counts), int)
  before[1] = 1
  return (
    random.normal(size=heads).astype(dtype),
    np.cos(angles).astype(np.float32),
    np.sin(angles).astype(np.float32),
    keys,
    values,
    *(
      x.astype(np.int32)
      for x in (places, block_tokens, block_places, before, pages)
    ),
    lengths,
    counts,
    masks,
    positions,
    *([] if sinks is None else [sinks]),
  )


def in_pages(pages, new, places):
  """Returns pages [P, Z, G * E] with tokens [N, G, E] written one by one."""
  pages = np.array(pages, np.float32)
  flat = pages.reshape(-1, pages.shape[2])
  for place, row in zip(places, new, strict=True):
    if place < len(flat):
      flat[place] = row.ravel()
  return pages


@pytest.mark.parametrize('case', PAGED_CASES)
@pytest.mark.parametrize('name', PAGED)
def test_pages_equal_oracle(name, case):
  has_sinks = case == 'chunk'
  case = PAGED_CASES[case]
  sinks = SINKS if has_sinks else None
  # The reference reads rows that nobody sees, and adds nothing of them.
  arrays = paged_arguments(case, sinks, 1e4 if name == 'reference' else np.nan)
  heads, cos, sin, keys, values, places, block_tokens, block_places = arrays[:8]
  table, *by_block = arrays[9:14]
  call = functools.partial(PAGED[name], **case.options)
  attended, *cache = jax.jit(call)(*arrays)
  turned = rotated(heads[None, :, :, :-1], cos[None], sin[None])[0]
  turned = turned.astype(np.float32)
  want_cache = (
    in_pages(keys, turned[:, :, -1], places),
    in_pages(values, heads[:, :, -1], places),
  )
  queries = turned[:, :, :-1][block_tokens]
  want = paged.expected(case, (queries, *want_cache, table, *by_block), sinks)
  want = want.reshape(-1, *want.shape[2:])[block_places]
  # The oracle misses the last token, which none but itself sees.
  known = slice(len(places) - NUM_PADDING - 1)
  attended = np.asarray(attended, np.float32)
  assert_close(attended[known], want[known], case.dtype)
  assert np.isfinite(attended).all()
  for got, rows in zip(cache, want_cache, strict=True):
    assert_close(got, rows, case.dtype)


def test_each_device_takes_its_heads_of_pages(monkeypatch):
  """Of chains, whose mask is not given."""
  monkeypatch.setattr(paged_gpu, 'fused_paged_attention', PAGED['pallas_gpu'])
  case = PAGED_CASES['chunk']
  arrays = list(paged_arguments(case, SINKS, 1e4))
  arrays[12] = None
  mesh = sharding_lib.make_mesh(jax.devices()[:2])
  plain = functools.partial(paged_reference.fused_paged_attention, scale=0.1)
  want = jax.jit(plain)(*arrays)
  known = slice(int(arrays[11].sum()) - 1)
  for implementation in ('auto', 'pallas_gpu'):
    call = functools.partial(
      paged_api.fused_paged_attention,
      scale=0.1,
      implementation=implementation,
      sharding=sharding_lib.sharding_of(mesh, (None, 'kv_tokens', 'kv_heads')),
    )
    got = jax.jit(call)(*arrays)
    attended = (np.asarray(x[0])[known] for x in (got, want))
    np.testing.assert_allclose(*attended, atol=2e-6)
    for x, y in zip(got[1:], want[1:], strict=True):
      np.testing.assert_allclose(x, y, atol=2e-6)
