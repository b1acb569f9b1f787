"""One test body for all implementations of tree attention, interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import Sizes, ancestor_mask, assert_close, oracle
from interpreters import implementations, interpret_tpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import dispatch
from kernels_pallas.tree_attention import (
  api,
  filled,
  pallas_gpu,
  pallas_tpu,
  reference,
)
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import buckets

pytestmark = pytest.mark.usefixtures('no_races')

IMPLEMENTATIONS = implementations(
  'tree_attention',
  native=None,
  pallas_tpu=pallas_tpu.Config(block_kv=128, num_heads=2),
  pallas_gpu=pallas_gpu.Config(block_kv=32, num_splits=3),
) | {'filled': filled.tree_attention}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Sizes):
  num_tokens: int = 5
  num_kv_heads: int = 2
  capacity: int = 256
  tree_size: int = 5


CASES = {
  # Trees that end before, at and after the edge of a tile, and an empty
  # prefix.
  'edges': Case(prefix_lengths=(0, 123, 124, 128), capacity=256),
  'one_token': Case(
    prefix_lengths=(127, 200), num_tokens=1, tree_size=1, num_groups=4
  ),
  # Less than the cache holds, to the last row of a part of it.
  'half_empty': Case(prefix_lengths=(3, 251), capacity=512),
  # A draft's new leaves before a grown tree; odd numbers of heads.
  'grown_tree': Case(
    prefix_lengths=(31, 190),
    num_tokens=8,
    tree_size=66,
    num_kv_heads=3,
    num_groups=1,
    head_dim=128,
  ),
  'window': Case(prefix_lengths=(3, 333), capacity=384, window=40),
  'bfloat16': Case(
    prefix_lengths=(100, 251), dtype='bfloat16', head_dim=128, num_groups=4
  ),
}


def arguments(case, seed=0, masks=None):
  """Random arrays; rows that no token may see are large."""
  random = np.random.default_rng(seed)
  batch = len(case.prefix_lengths)
  if masks is None:
    masks = [
      ancestor_mask(random.integers(0, 1000, case.tree_size), case.tree_size)
      for _ in range(batch)
    ]
  masks = np.stack(masks)[:, -case.num_tokens :]
  lengths = np.asarray(case.prefix_lengths, np.int32)
  depths = masks.sum(axis=2, dtype=np.int32) - 1
  cache = (batch, case.num_kv_heads, case.capacity, case.head_dim)
  shape = batch, case.num_tokens, *case.num_heads, case.head_dim
  queries = random.normal(size=shape)
  keys, values = random.normal(size=cache), random.normal(size=cache)
  ends = lengths + case.tree_size
  for row, end in enumerate(ends):
    keys[row, :, end:] = 1e4
    values[row, :, end:] = 1e4
  return (
    *(x.astype(jnp.dtype(case.dtype)) for x in (queries, keys, values)),
    lengths,
    masks,
    lengths[:, None] + np.maximum(depths, 0),
  )


@functools.cache
def compiled(name, case):
  return jax.jit(functools.partial(IMPLEMENTATIONS[name], **case.options))


def check(name, case, arrays):
  got = compiled(name, case)(*arrays)
  assert got.dtype == case.dtype
  assert_close(got, oracle(*arrays, **case.options), case.dtype)
  return np.asarray(got)


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_equals_oracle(name, case):
  check(name, CASES[case], arguments(CASES[case]))


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_padding_changes_nothing(name):
  """The same tokens with other ones after them, and a longer tree."""
  case = CASES['edges']
  *arrays, masks, positions = arguments(case)
  got = compiled(name, case)(*arrays, masks, positions)
  queries, *cache = arrays
  rows = ((0, 0), (0, 3))
  padded = compiled(name, dataclasses.replace(case, num_tokens=8, tree_size=8))(
    np.pad(queries, (*rows, *((0, 0),) * 3)),
    *cache,
    np.pad(masks, (*rows, (0, 3))),
    np.pad(positions, rows),
  )
  np.testing.assert_allclose(padded[:, :5], got, atol=1e-6)


@pytest.mark.parametrize('window', [None, 40])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_tokens_have_the_same_bits_alone_on_gpus(dtype, window):
  """Before, at and after the edges of blocks, which trees and chains cross."""
  case = Case(
    prefix_lengths=(3, 29, 63, 127, 128, 190),
    num_tokens=8,
    tree_size=8,
    dtype=dtype,
    window=window,
  )
  queries, keys, values, lengths, masks, positions = arguments(case)
  call = compiled('pallas_gpu', case)
  found = call(queries, keys, values, lengths, masks, positions)
  chains = np.broadcast_to(np.tri(8, dtype=bool), masks.shape)
  rows = np.arange(len(lengths))
  for node in range(8):
    path = np.argsort(~masks[:, node], axis=1, kind='stable')
    moved = lengths[:, None] + path

    def in_order(cache, moved=moved):
      cache = cache.copy()
      tree = lengths[:, None] + np.arange(8)
      cache[rows[:, None], :, tree] = cache[rows[:, None], :, moved]
      return cache

    alone = call(
      np.roll(queries, -node, axis=1),
      in_order(keys),
      in_order(values),
      positions[:, node],
      chains,
      positions[:, node, None] + np.arange(8),
    )
    np.testing.assert_array_equal(alone[:, 0], found[:, node])


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_row_that_sees_nothing_gives_zeros(name):
  case = CASES['edges']
  *arrays, masks, positions = arguments(case)
  masks[:, 1] = False
  got = check(name, case, (*arrays, masks, positions))
  assert not got[0, 1].any()  # no prefix, nothing of the tree
  assert got[0, 2].all()
  assert got[1, 1].all()  # the prefix alone


def test_chain_is_the_lower_triangle():
  case = dataclasses.replace(CASES['edges'], tree_size=5)
  arrays = arguments(case, masks=[np.tri(5, dtype=bool)] * 4)
  options = {'scale': 0.125, 'implementation': 'reference'}
  attend = jax.jit(functools.partial(api.tree_attention, **options))
  with_mask = attend(*arrays)
  without = attend(*arrays[:4], None, arrays[5])
  np.testing.assert_array_equal(with_mask, without)


WINDOW_IN_BFLOAT16 = dataclasses.replace(CASES['window'], dtype='bfloat16')


@pytest.mark.parametrize(
  ('name', 'case'),
  [
    *((name, CASES['edges']) for name in IMPLEMENTATIONS),
    ('reference', WINDOW_IN_BFLOAT16),
    ('pallas_gpu', WINDOW_IN_BFLOAT16),
  ],
)
def test_sinks_take_a_share(name, case):
  """Heads whose sink is far below, beside and far above the scores.

  Tokens that see nothing are zeros still.
  """
  arrays = arguments(case)
  arrays[4][0] = False
  sinks = np.resize(np.float32([-50, 0, 2, 1, 60, 3, -1]), case.num_heads)
  got = compiled(name, case)(*arrays, sinks.astype(jnp.dtype(case.dtype)))
  assert_close(got, oracle(*arrays, **case.options, sinks=sinks), case.dtype)


def test_each_device_takes_its_heads():
  """The TPU kernel on two simulated devices that share the heads."""
  case = CASES['one_token']
  arrays = arguments(case)
  mesh = sharding.make_mesh(jax.devices()[:2])
  heads = sharding.sharding_of(mesh, ('batch', 'kv_heads', None, None))
  placed = jax.device_put(arrays, sharding.replicated(mesh))
  sinks = np.arange(8, dtype=np.float32).reshape(case.num_heads)
  options = {'scale': 0.125, 'implementation': 'pallas_tpu', 'sharding': heads}
  attend = functools.partial(api.tree_attention, **options)
  with pltpu.force_tpu_interpret_mode(interpret_tpu()):
    got = jax.jit(attend)(*placed, sinks=sinks)
  plain = functools.partial(reference.tree_attention, scale=0.125)
  want = jax.jit(plain)(*arrays, sinks)
  np.testing.assert_allclose(got, want, atol=2e-6)


def test_choice_and_reason_can_be_read():
  case = dataclasses.replace(CASES['edges'], head_dim=32)
  arrays = arguments(case)
  jax.eval_shape(functools.partial(api.tree_attention, scale=1.0), *arrays)
  newest = dispatch.choices()[-1]
  assert newest.kernel == 'tree_attention'
  assert newest.implementation == 'native'
  assert newest.reason.startswith('made for cpu; agrees with the reference')
  sinks = np.zeros(case.num_heads, np.float32)
  options = {'scale': 1.0, 'sinks': sinks}
  jax.eval_shape(functools.partial(api.tree_attention, **options), *arrays)
  assert dispatch.choices()[-1].shape.endswith('window None, sinks')
  with pytest.raises(NotImplementedError, match='head_dim 32'):
    api.tree_attention(*arrays, scale=1.0, implementation='pallas_tpu')


def test_auto_falls_back_with_the_reason():
  def refuse():
    raise NotImplementedError('too wide')

  checks = {'pallas_gpu': refuse, 'pallas_tpu': lambda: None}
  assert dispatch.choose('x', 'wide', 'auto', 'gpu', checks) == 'reference'
  assert dispatch.choose('x', 'wide', 'auto', 'tpu', checks) == 'pallas_tpu'
  checks = {'pallas_gpu': lambda: None}
  chosen = dispatch.choose('x', 'narrow', 'mosaic_gpu', 'gpu', checks)
  assert chosen == 'pallas_gpu'
  reasons = [c.reason for c in dispatch.choices() if c.kernel == 'x']
  assert reasons == [
    'pallas_gpu cannot do it: too wide',
    'made for tpu',
    'there is no mosaic_gpu',
  ]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('num_new', [1, 64])
@pytest.mark.parametrize('limit', [512, 1024, 8192])
def test_warm_up_has_a_text_for_each_part_of_a_cache(limit, num_new, dtype):
  sizes = filled.part_sizes(limit + num_new, dtype)
  chosen = {
    min(size for size in sizes if size >= length + num_new)
    for length in buckets.text_lengths(limit + num_new)
  }
  assert chosen == set(sizes)
