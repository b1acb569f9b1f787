"""One test body for all implementations of the move of rows, interpreted.

Rows are moved, or multiplied by ones and zeros, so all of them agree exactly
with numpy's indexing. The path here is what a draft has after a verdict:
verified rows, surviving rows, then zeros.
"""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from interpreters import implementations, interpret_tpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.kv_commit import api, native, pallas_gpu, pallas_tpu
from kernels_pallas.paged_commit import api as paged_api
from kernels_pallas.paged_commit import pallas_gpu as paged_gpu
from swiftspec_jax.runtime import sharding

pytestmark = pytest.mark.usefixtures('no_races')


IMPLEMENTATIONS = implementations(
  'kv_commit',
  native=None,
  pallas_tpu=None,
  pallas_gpu=pallas_gpu.Config(num_caches=4),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Sizes as in the kernels' legend."""

  starts: tuple[int, ...] = (37,)
  num_kept: int = 6
  num_rows: int = 8
  num_caches: int = 3
  num_kv_heads: int = 2
  head_dim: int = 128
  capacity: int = 128
  dtype: str = 'bfloat16'


CASES = {
  'float32': Case(dtype='float32'),
  'rows_on_lanes': Case(head_dim=64, capacity=384, starts=(125, 300)),
  'rows_on_lanes_float32': Case(head_dim=64, capacity=256, dtype='float32'),
  # Windows at, before and after the edge of a tile, and at the end.
  'edges': Case(starts=(0, 15, 16, 120)),
  # More rows than the path has places, as of a draft that reads features.
  'long': Case(num_kept=33, num_rows=40, starts=(80,)),
  'padded_twin': Case(num_kept=0),
}


def arguments(case, seed=0, offsets=None):
  """Random caches with rows that are not numbers after the window."""
  random = np.random.default_rng(seed)
  batch = len(case.starts)
  shape = (batch, case.num_kv_heads, case.capacity, case.head_dim)
  caches = random.normal(size=(case.num_caches, *shape))
  for row, start in enumerate(case.starts):
    caches[:, row, :, start + case.num_rows :] = np.nan
  length = max(case.num_kept, 8)
  path = np.zeros((batch, length), np.int32)
  for row in path:
    kept = random.choice(case.num_rows, case.num_kept, replace=False)
    row[: case.num_kept] = sorted(kept) if offsets is None else offsets
  caches = list(caches.astype(jnp.dtype(case.dtype)))
  return caches, np.asarray(case.starts, np.int32), path


def oracle(caches, starts, path):
  """Numpy's indexing, whose right side is read first."""
  moved = [np.array(cache) for cache in caches]
  for cache in moved:
    for row, (start, offsets) in enumerate(zip(starts, path, strict=True)):
      rows = np.arange(start, start + len(offsets))
      cache[row][:, rows] = cache[row][:, start + offsets]
  return moved


@functools.cache
def compiled(name, num_rows):
  return jax.jit(functools.partial(IMPLEMENTATIONS[name], num_rows=num_rows))


def check(name, case, arrays):
  got = compiled(name, case.num_rows)(*arrays)
  assert isinstance(got, list)  # or the cache becomes another pytree
  assert {cache.dtype for cache in got} == {jnp.dtype(case.dtype)}
  check_equal(got, arrays)


def check_equal(got, arrays):
  want = oracle(arrays[0], *map(np.asarray, arrays[1:]))
  # Numpy compares only its own numbers that are not numbers.
  np.testing.assert_array_equal(
    np.asarray(got, np.float32), np.asarray(want, np.float32)
  )


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_equals_oracle(name, case):
  check(name, CASES[case], arguments(CASES[case]))


@pytest.mark.parametrize('name', ['reference', 'native', 'pallas_gpu'])
def test_narrow_heads_and_more_caches_than_a_launch(name):
  case = Case(head_dim=16, num_caches=5, num_kv_heads=1)
  check(name, case, arguments(case))


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
@hypothesis.given(offsets=st.lists(st.integers(0, 7), min_size=6, max_size=6))
@hypothesis.settings(max_examples=5)
def test_any_path(name, offsets):
  check(name, Case(), arguments(Case(), offsets=offsets))


def test_windows_that_do_not_fit_at_once():
  arrays = arguments(Case(num_caches=5))
  config = pallas_tpu.Config(window_bytes=40_000)
  move = functools.partial(
    pallas_tpu.kv_commit, num_rows=8, config=config, interpret=interpret_tpu()
  )
  check_equal(jax.jit(move)(*arrays), arrays)


def test_each_device_moves_its_heads():
  """The TPU kernel on two simulated devices that share the heads."""
  arrays = arguments(Case())
  mesh = sharding.make_mesh(jax.devices()[:2])
  heads = sharding.sharding_of(mesh, ('batch', 'kv_heads', None, None))
  caches = jax.device_put(arrays[0], heads)
  others = jax.device_put(arrays[1:], sharding.replicated(mesh))
  move = functools.partial(
    api.kv_commit, num_rows=8, implementation='pallas_tpu', sharding=heads
  )
  with pltpu.force_tpu_interpret_mode(interpret_tpu()):
    got = jax.jit(move)(caches, *others)
  check_equal(got, arrays)


def test_what_no_kernel_takes_is_named():
  arrays = arguments(Case(head_dim=64))
  with pytest.raises(NotImplementedError, match='in whole tiles of 128'):
    api.kv_commit(*arrays, num_rows=8, implementation='pallas_tpu')
  with pytest.raises(NotImplementedError, match='300 rows are more than 256'):
    api.kv_commit(*arrays, num_rows=300, implementation='pallas_gpu')
  (caches, *rest) = jax.device_put(arrays, jax.devices()[0])
  caches = [cache.astype(jnp.complex64) for cache in caches]
  with pytest.raises(jax.errors.JaxRuntimeError, match='no cache has type 15'):
    jax.block_until_ready(native.kv_commit(caches, *rest, num_rows=8))


@pytest.mark.parametrize('implementation', ['reference', 'pallas_gpu'])
@pytest.mark.parametrize('num_devices', [1, 2])
def test_rows_move_within_their_pages(implementation, num_devices, monkeypatch):
  """Of two rows, one with a place that is nowhere; others stay."""
  kernel = functools.partial(paged_gpu.paged_commit, interpret=True)
  monkeypatch.setattr(paged_gpu, 'paged_commit', kernel)
  random = np.random.default_rng(0)
  shape = 6, 4, 96  # the columns are no multiple of those of a program
  caches = list(random.normal(size=(3, *shape)).astype(np.float32))
  sources = np.array([[1, 3, 4, 20], [9, 10, 11, 8]], np.int32)
  targets = np.array([[0, 1, 3, 4], [8, 9, 10, 24]], np.int32)
  mesh = sharding.make_mesh(jax.devices()[:num_devices])
  heads = sharding.sharding_of(mesh, (None, None, 'kv_heads'))
  call = functools.partial(
    paged_api.paged_commit, implementation=implementation, sharding=heads
  )
  got = jax.jit(call)(jax.device_put(caches, heads), sources, targets)
  for moved, cache in zip(got, caches, strict=True):
    want = np.array(cache).reshape(24, 96)
    is_kept = targets < 24
    want[targets[is_kept]] = want[sources[is_kept]]
    np.testing.assert_array_equal(moved, want.reshape(shape))
