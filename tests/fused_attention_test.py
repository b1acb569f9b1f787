"""Rotation, write and attention in one launch, interpreted; oracle in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import TOLERANCES, ancestor_mask, oracle

from kernels_pallas.fused_attention import api, pallas_gpu, reference
from swiftspec_jax import sharding as sharding_lib

IMPLEMENTATIONS = {
  'reference': reference.fused_attention,
  'pallas_gpu': functools.partial(
    pallas_gpu.fused_attention,
    config=pallas_gpu.Config(block_kv=32, num_splits=3),
    interpret=True,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Sizes as in the kernel's legend."""

  prefix_lengths: tuple[int, ...]
  num_tokens: int = 5
  num_groups: int = 3
  num_kv_heads: int = 2
  head_dim: int = 32
  tree_size: int = 5
  dtype: str = 'float32'
  window: int | None = None


CAPACITY = 96
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
    size=(2, batch, case.num_kv_heads, CAPACITY, case.head_dim)
  )
  for row, start in enumerate(starts):
    cache[:, row, :, start : start + tokens] = np.nan
  parents = random.integers(0, 100, case.tree_size)
  masks = [ancestor_mask(parents, case.tree_size)[-tokens:]] * batch
  depths = np.sum(masks, axis=2)
  return (
    jnp.asarray(heads, case.dtype),
    jnp.asarray(np.cos(angles), jnp.float32),
    jnp.asarray(np.sin(angles), jnp.float32),
    *jnp.asarray(cache, case.dtype),
    jnp.asarray(starts),
    jnp.asarray(lengths),
    jnp.asarray(masks),
    jnp.asarray(lengths[:, None] + depths - 1, jnp.int32),
  )


def rotated(x, cos, sin):
  """Pairs are the halves of x [B, T, ..., E]."""
  turns = np.asarray(cos) + 1j * np.asarray(sin)
  first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
  turns = turns.reshape(*turns.shape[:2], *(1,) * (x.ndim - 3), -1)
  pairs = (first + 1j * second) * turns
  return np.concatenate([pairs.real, pairs.imag], axis=-1)


def written(rows, new, starts):
  rows = np.array(rows.astype(jnp.float32))
  for row, start in enumerate(np.asarray(starts)):
    rows[row, :, start : start + new.shape[1]] = np.moveaxis(new[row], 0, 1)
  return jnp.asarray(rows)


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_equals_oracle(name, case):
  case = CASES[case]
  arrays = arguments(case)
  options = {'scale': case.head_dim**-0.5, 'window': case.window}
  call = functools.partial(IMPLEMENTATIONS[name], **options)
  attended, *cache = jax.jit(call)(*arrays)
  heads, cos, sin, keys, values, starts, *seen = arrays
  turned = rotated(heads[:, :, :, :-1].astype(jnp.float32), cos, sin)
  new_values = heads[:, :, :, -1].astype(jnp.float32)
  want_cache = (
    written(keys, turned[:, :, :, -1], starts),
    written(values, np.asarray(new_values), starts),
  )
  want = oracle(
    jnp.asarray(turned[:, :, :, :-1]),
    *want_cache,
    *seen,
    **options,
    soft_cap=None,
  )
  tolerance = TOLERANCES[case.dtype]
  close = functools.partial(
    np.testing.assert_allclose, rtol=tolerance, atol=tolerance
  )
  close(attended.astype(jnp.float32), want)
  for got, rows in zip(cache, want_cache, strict=True):
    close(got.astype(jnp.float32), rows)
  # A key may be rounded the other way.
  np.testing.assert_array_equal(cache[1].astype(jnp.float32), want_cache[1])


@pytest.mark.parametrize('implementation', ['auto', 'pallas_gpu'])
def test_a_chain_has_no_mask(implementation, monkeypatch):
  """On each of two devices, with heads and sinks of its own."""
  kernel = functools.partial(pallas_gpu.fused_attention, interpret=True)
  monkeypatch.setattr(pallas_gpu, 'fused_attention', kernel)
  case = CASES['edges']
  *arrays, masks, positions = arguments(case)
  chain = jnp.broadcast_to(
    jnp.tri(case.num_tokens, dtype=bool)[None], masks.shape
  )
  sinks = jnp.arange(6.0).reshape(case.num_kv_heads, case.num_groups)
  mesh = sharding_lib.make_mesh(jax.devices()[:2])
  on_mesh = sharding_lib.sharding_of(mesh, ('batch', 'kv_heads', None, None))
  call = functools.partial(
    api.fused_attention,
    scale=0.1,
    implementation=implementation,
    sharding=on_mesh,
  )
  got = jax.jit(call)(*arrays, None, positions, sinks)
  want = reference.fused_attention(*arrays, chain, positions, sinks, scale=0.1)
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, atol=2e-6)
