"""One test body for all implementations of paged attention, interpreted.

What a kernel must not read is NaN, or lies in pages that are not there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import (
  TOLERANCES,
  Sizes,
  ancestor_mask,
  assert_close,
  oracle,
)
from interpreters import implementations, interpret_tpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from kernels_pallas import dispatch
from kernels_pallas.paged_attention import (
  api,
  arg_specs,
  native,
  pallas_gpu,
  pallas_tpu,
  shared_pages,
)
from kernels_pallas.tree_attention import native as tree_native
from swiftspec_jax.runtime import sharding

pytestmark = pytest.mark.usefixtures('no_races')

IMPLEMENTATIONS = implementations(
  'paged_attention',
  pallas_tpu=pallas_tpu.Config(block_kv=128, num_heads=2),
  pallas_gpu=pallas_gpu.Config(block_kv=32, num_splits=3),
  native=None,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Sizes):
  num_tokens: tuple[int, ...]
  size: int = 5
  num_kv_heads: int = 4
  page_size: int = 16
  num_columns: int = 20

  @property
  def sinks(self):
    """Those of the cases that devices share; none beside a window."""
    return None if self.window else np.ones(self.num_heads, np.float32)


CASES = {
  # Blocks that end before, at and after the edge of a page and of a tile,
  # with padding, and padding alone; up to the last row of a table.
  'trees': Case(
    prefix_lengths=(0, 123, 128, 40, 315), num_tokens=(5, 5, 1, 0, 5)
  ),
  'one_token': Case(
    prefix_lengths=(0, 127, 200, 9),
    num_tokens=(1, 1, 1, 0),
    size=1,
    num_kv_heads=1,
    num_groups=4,
    head_dim=128,
  ),
  'window': Case(
    prefix_lengths=(3, 290),
    num_tokens=(4, 5),
    num_groups=1,
    page_size=8,
    num_columns=40,
    window=40,
  ),
  'bfloat16': Case(
    prefix_lengths=(100, 251),
    num_tokens=(5, 3),
    num_kv_heads=1,
    head_dim=128,
    dtype='bfloat16',
  ),
}


def arguments(case, unseen, missing=-1, is_chain=False):
  """Random arrays; pages lie in any order.

  Args:
    case: sizes.
    unseen: in the rows that nobody may see.
    missing: in the table where no page is needed.
    is_chain: whether all masks are triangles.
  """
  random = np.random.default_rng(0)
  num_blocks, size = len(case.prefix_lengths), case.size
  pages = case.num_columns * num_blocks
  table = random.permutation(pages).reshape(num_blocks, case.num_columns)
  store = (pages, case.page_size, case.num_kv_heads * case.head_dim)
  keys, values = random.normal(size=store), random.normal(size=store)
  lengths = np.asarray(case.prefix_lengths)
  num_tokens = np.asarray(case.num_tokens)
  for block, end in enumerate(np.where(num_tokens, lengths + num_tokens, 0)):
    for row in range(end, case.num_columns * case.page_size):
      place = table[block, row // case.page_size], row % case.page_size
      keys[place] = values[place] = unseen
    table[block, -(-end // case.page_size) :] = missing
  masks = np.stack(
    [
      np.tri(size, dtype=bool)
      if is_chain
      else ancestor_mask(random.integers(0, 1000, size), size)
      for _ in range(num_blocks)
    ]
  )
  depths = masks.sum(axis=2) - 1
  shape = num_blocks, size, *case.num_heads, case.head_dim
  queries = random.normal(size=shape)
  return (
    *(x.astype(jnp.dtype(case.dtype)) for x in (queries, keys, values)),
    *(x.astype(np.int32) for x in (table, lengths, num_tokens)),
    masks,
    (lengths[:, None] + depths).astype(np.int32),
  )


def expected(case, arrays, sinks=None):
  """Rows are put one after another one by one; padding gives zeros."""
  queries, keys, values, table, lengths, num_tokens, masks, positions = map(
    np.asarray, arrays
  )
  shape = (len(table), case.num_kv_heads, 0, case.head_dim)
  shape = (*shape[:2], case.num_columns * case.page_size, shape[3])
  own_keys, own_values = np.zeros(shape), np.zeros(shape)
  for block in range(len(table)):
    for row in range(lengths[block] + num_tokens[block]):
      page = table[block, row // case.page_size]
      if num_tokens[block]:
        place = page, row % case.page_size
        own_keys[block, :, row] = keys[place].reshape(shape[1], shape[3])
        own_values[block, :, row] = values[place].reshape(shape[1], shape[3])
  is_token = np.arange(case.size) < num_tokens[:, None]
  rows = own_keys, own_values, lengths, masks & is_token[:, None]
  want = oracle(queries, *rows, positions, **case.options, sinks=sinks)
  return np.where(is_token[:, :, None, None, None], want, 0)


@functools.cache
def compiled(name, case):
  return jax.jit(functools.partial(IMPLEMENTATIONS[name], **case.options))


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_equals_oracle(name, case):
  case = CASES[case]
  # The reference reads all pages, and adds nothing of them.
  unseen = {'unseen': np.nan, 'missing': 10**6}
  if name == 'reference':
    unseen = {'unseen': 1e4}
  for is_chain in (False, True):
    arrays = arguments(case, **unseen, is_chain=is_chain)
    got = compiled(name, case)(*arrays)
    assert got.dtype == case.dtype
    assert_close(got, expected(case, arrays), case.dtype)


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_padding_changes_nothing(name):
  """The same blocks with room for more tokens, and with longer tables."""
  case = CASES['bfloat16']
  arrays = arguments(case, unseen=1e4)
  got = compiled(name, case)(*arrays)
  queries, keys, values, table, *lengths, masks, positions = arrays
  more = (0, 3)
  wide = dataclasses.replace(case, size=8, num_columns=23)
  padded = compiled(name, wide)(
    np.pad(queries, ((0, 0), more, *((0, 0),) * 3)),
    keys,
    values,
    np.pad(table, ((0, 0), more), constant_values=-1),
    *lengths,
    np.pad(masks, ((0, 0), more, more)),
    np.pad(positions, ((0, 0), more)),
  )
  assert not np.asarray(padded)[:, 5:].any()
  got, padded = (np.asarray(x, np.float32) for x in (got, padded))
  np.testing.assert_allclose(padded[:, :5], got, atol=TOLERANCES['bfloat16'])


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_sinks_take_a_share(name):
  """Heads whose sink is far below, beside and far above the scores."""
  case = dataclasses.replace(CASES['trees'], window=40)
  arrays = arguments(case, unseen=1e4)
  sinks = np.resize(np.float32([-50, 0, 2, 1, 60, 3, -1]), case.num_heads)
  got = compiled(name, case)(*arrays, sinks)
  want = expected(case, arrays, sinks)
  np.testing.assert_allclose(got, want, atol=TOLERANCES['float32'])


@pytest.mark.parametrize(
  ('dtype', 'size'), [('float32', 5), ('float32', 64), ('bfloat16', 16)]
)
def test_native_bits_are_those_of_single_tokens_over_rows(dtype, size):
  """Chunks of a prompt whose pages of any size lie in any order."""
  num_tokens, heads = 192, (2, 3, 32)
  random = np.random.default_rng(0)
  queries = random.normal(size=(num_tokens, *heads)).astype(jnp.dtype(dtype))
  keys, values = (  # pages of float32 have numbers of the queries' dtype
    random.normal(size=(num_tokens, heads[0], heads[2])).astype(queries.dtype)
    for _ in range(2)
  )
  options = {'scale': 0.2, 'window': 150}
  sinks = random.normal(size=heads[:2]).astype(np.float32)
  tree = jax.jit(functools.partial(tree_native.tree_attention, **options))
  rows = [np.moveaxis(x, 0, 1)[None] for x in (keys, values)]
  want = [
    tree(
      queries[None, i : i + 1],
      *rows,
      np.int32([i]),
      np.ones((1, 1, 1), bool),
      np.int32([[i]]),
      sinks,
    )[0, 0]
    for i in range(num_tokens)
  ]
  paged = jax.jit(functools.partial(native.paged_attention, **options))
  for page_size, stored in ((8, 'float32'), (24, dtype), (192, 'float32')):
    num_pages = num_tokens // page_size
    order = random.permutation(num_pages + 3)[:num_pages].astype(np.int32)
    stores = []
    for x in (keys, values):
      store = np.full((num_pages + 3, page_size, heads[0] * heads[2]), np.nan)
      store[order] = x.reshape(num_pages, page_size, -1)
      stores.append(store.astype(jnp.dtype(stored)))
    starts = np.arange(0, num_tokens, size, dtype=np.int32)
    padded = np.zeros((len(starts) * size, *heads), queries.dtype)
    padded[:num_tokens] = queries
    got = paged(
      padded.reshape(len(starts), size, *heads),
      *stores,
      np.tile(order, (len(starts), 1)),
      starts,
      np.minimum(num_tokens - starts, size).astype(np.int32),
      np.tile(np.tri(size, dtype=bool), (len(starts), 1, 1)),
      starts[:, None] + np.arange(size, dtype=np.int32),
      sinks,
    )
    np.testing.assert_array_equal(
      got.reshape(padded.shape)[:num_tokens], np.stack(want)
    )


def test_the_choice_on_cpus():
  case = CASES['bfloat16']
  arrays = list(arguments(case, unseen=1e4))
  arrays[1:3] = [x.astype(np.float32) for x in arrays[1:3]]  # as caches have
  got = api.paged_attention(*arrays, **case.options)
  newest = dispatch.choices()[-1]
  assert (newest.kernel, newest.implementation) == ('paged_attention', 'native')
  assert newest.reason.startswith('made for cpu; agrees with the reference')
  assert_close(got, expected(case, arrays), case.dtype)


@pytest.mark.parametrize('window', [None, 40])
def test_blocks_of_one_row_share_a_copy(window):
  """Two full blocks, one with padding, and padding alone."""
  case = dataclasses.replace(
    CASES['trees'],
    prefix_lengths=(100, 105, 110, 0),
    num_tokens=(5, 5, 3, 0),
    window=window,
  )
  arrays = list(arguments(case, unseen=1e4, is_chain=True))
  arrays[3] = np.tile(arrays[3][2], (len(arrays[3]), 1))
  sinks = np.ones(case.num_heads, np.float32)
  call = functools.partial(
    api.paged_attention,
    **case.options,
    is_one_row=True,
    implementation='reference',
  )
  got = jax.jit(call)(*arrays[:6], None, arrays[7], sinks=sinks)
  want = expected(case, arrays, sinks)
  np.testing.assert_allclose(got, want, atol=TOLERANCES['float32'])


def test_each_device_takes_its_heads_of_a_chain():
  """The TPU kernel on two simulated devices that share the heads."""
  case = CASES['trees']
  arrays = arguments(case, unseen=1e4, is_chain=True)
  mesh = sharding.make_mesh(jax.devices()[:2])
  pages = sharding.sharding_of(mesh, (None, None, 'kv_heads'))
  placed = list(jax.device_put(arrays, sharding.replicated(mesh)))
  placed[1:3] = jax.device_put(arrays[1:3], pages)
  placed[6] = None  # the mask of a chain
  sinks = np.arange(-6, 6, dtype=np.float32).reshape(case.num_heads)
  options = {**case.options, 'sharding': pages, 'sinks': sinks}
  results = {}
  with pltpu.force_tpu_interpret_mode(interpret_tpu()):
    for name in ('pallas_tpu', 'reference'):
      call = functools.partial(
        api.paged_attention, implementation=name, **options
      )
      results[name] = jax.jit(call)(*placed)
  want = expected(case, arrays, sinks)
  for got in results.values():
    np.testing.assert_allclose(got, want, atol=TOLERANCES['float32'])


@pytest.mark.parametrize(
  ('case', 'num_sharing', 'is_chain'),
  [
    ('trees', 2, False),
    ('one_token', 8, True),
    ('window', 8, False),
    ('bfloat16', 2, True),
  ],
)
def test_devices_share_the_rows_of_each_page(case, num_sharing, is_chain):
  """The parts of some devices are merged, an attention sink counted once."""
  case = CASES[case]
  mesh = sharding.make_mesh(jax.devices()[:num_sharing], num_sharing)
  pages = sharding.sharding_of(mesh, (None, 'kv_tokens', 'kv_heads'))
  arrays = arguments(case, unseen=1e4, is_chain=is_chain)
  placed = list(jax.device_put(arrays, sharding.replicated(mesh)))
  placed[1:3] = jax.device_put(arrays[1:3], pages)
  if is_chain:
    placed[6] = None
  call = functools.partial(
    api.paged_attention, **case.options, sinks=case.sinks, sharding=pages
  )
  got = jax.jit(call)(*placed)
  assert_close(got, expected(case, arrays, case.sinks), case.dtype)


# An empty prefix, and padding alone.
EDGES = {
  'prefix_lengths': (0, 251, 40),
  'num_tokens': (5, 3, 0),
  'page_size': 32,
  'num_columns': 10,
}


@pytest.mark.parametrize(
  ('name', 'case', 'num_sharing', 'changes'),
  [
    ('pallas_gpu', 'trees', 2, {}),
    ('pallas_gpu', 'window', 4, {}),
    ('pallas_tpu', 'bfloat16', 2, EDGES),
    ('pallas_tpu', 'window', 2, {'page_size': 16, 'num_columns': 20}),
  ],
)
def test_kernels_on_the_rows_of_each_device(name, case, num_sharing, changes):
  """Some devices keep no rows, as many as keep some."""
  case = dataclasses.replace(CASES[case], **changes)
  mesh = sharding.make_mesh(jax.devices()[: 2 * num_sharing], 2 * num_sharing)
  arrays = arguments(case, unseen=1e4)
  nothing = ((0, 0), (0, case.page_size), (0, 0))
  pages = [np.pad(x, nothing, constant_values=1e4) for x in arrays[1:3]]
  attend = functools.partial(
    IMPLEMENTATIONS[name], with_sums=True, **case.options
  )
  whole, tokens = PartitionSpec(), PartitionSpec(None, 'sequence')
  got = jax.jit(
    jax.shard_map(
      functools.partial(
        shared_pages.paged_attention,
        attend,
        axis_name='sequence',
        page_size=case.page_size,
        window=case.window,
      ),
      mesh=mesh,
      in_specs=(whole, tokens, tokens, *(whole,) * 6),
      out_specs=whole,
      check_vma=False,
    )
  )(arrays[0], *pages, *arrays[3:], case.sinks)
  assert_close(got, expected(case, arrays, case.sinks), case.dtype)


@pytest.mark.parametrize(
  ('changes', 'name', 'reason'),
  [
    ({'head_dim': 32}, 'pallas_tpu', 'head_dim 32'),
    ({'num_kv_heads': 3}, 'pallas_tpu', 'rows of 192 numbers'),
    ({'page_size': 4}, 'pallas_tpu', 'pages of 4 rows'),
    ({'num_columns': 70_000}, 'pallas_tpu', 'a page table of 560000 bytes'),
    ({'num_groups': 64}, 'pallas_gpu', '320 rows of queries'),
    ({'num_columns': 2**20}, 'pallas_gpu', 'pages of 4294967296 numbers'),
  ],
)
def test_what_no_kernel_takes_is_named(changes, name, reason):
  case = dataclasses.replace(CASES['window'], **changes)
  blocks, pages = len(case.num_tokens), case.num_columns * 2
  heads = (*case.num_heads, case.head_dim)
  width = case.num_kv_heads * case.head_dim
  spec = (
    jax.ShapeDtypeStruct((blocks, case.size, *heads), case.dtype),
    jax.ShapeDtypeStruct((pages, case.page_size, width), case.dtype),
    case.num_columns,
  )
  check = {'pallas_tpu': pallas_tpu, 'pallas_gpu': pallas_gpu}[name].check
  with pytest.raises(NotImplementedError, match=reason):
    check(*spec)


def test_long_contexts_are_one_class():
  specs = [
    dataclasses.replace(spec, context=context, name='')
    for spec in arg_specs.arg_specs()[:1]
    for context in (240, 2_000, 8_000)
  ]
  short, *long = [spec.shape_class() for spec in specs]
  assert long[0] == long[1] != short
