"""Devices that share the tokens of a sequence: equal tokens, no KV moves."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from decoding_cases import CONFIG, requests_of, run
from engine_cases import FEW, TARGET, TREES, make_sizes

import swiftspec_jax as ss
from experiments.aot import long_context, rows, targets
from swiftspec_jax import errors, sharding, testing
from swiftspec_jax.cache import paged
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.serving.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.step import ragged_batch, step_devices, target_forward


@functools.cache
def shared(num_devices, num_sharing):
  return testing.random_model(
    CONFIG, devices=jax.devices()[:num_devices], sequence_devices=num_sharing
  )


@functools.cache
def expected(count=3):
  """Prompts of several chunks, decoded by one device."""
  requests = requests_of(count, max_new_tokens=24)
  decoder = ss.Decoder(TARGET, batch_size=3)
  return [result.token_ids for result in run(decoder, requests)]


@pytest.mark.parametrize(
  ('drafts', 'num_devices', 'num_sharing'),
  [('none', 8, 8), ('tree', 4, 2)],
)
def test_tokens_are_those_of_one_device(drafts, num_devices, num_sharing):
  model = shared(num_devices, num_sharing)
  draft = {
    'none': None,
    'tree': TreeDraft(model=model, width=3, branching=3),
  }[drafts]
  sizes = make_sizes(drafts=TREES if drafts == 'tree' else FEW)
  engine = Engine(model, draft, sizes=sizes, policy=FixedLength(3))
  requests = requests_of(3, max_new_tokens=24)
  handles = [engine.submit(request) for request in requests]
  assert [x.result().token_ids for x in handles] == expected()


@pytest.mark.parametrize(
  'tree',
  [
    None,
    pytest.param(ss.TreeConfig(num_nodes=4, width=2), marks=pytest.mark.ci),
  ],
  ids=['chain', 'tree'],
)
def test_dense_caches_are_not_shared_and_give_the_same_tokens(tree):
  model = shared(4, 2)
  decoder = ss.Decoder(model, model, tree=tree)
  requests = requests_of(3, max_new_tokens=24)
  found = [result.token_ids for result in run(decoder, requests)]
  assert found == expected()


class Devices(targets.Target):
  """The simulated devices of this process."""

  @property
  def devices(self):
    return jax.devices()


@pytest.mark.parametrize(
  ('step', 'num_sharing'), [('decode', 8), ('tree', 2), ('prompt', 8)]
)
def test_no_keys_or_values_are_exchanged(step, num_sharing):
  """What the largest collective carries is less than a device's part of them.

  That is the logits, whatever the context.
  """
  host = Devices(name='host', platform='cpu', topology='', bytes_per_device=1)
  context = 8192
  program = long_context.lower(
    CONFIG, num_sharing, host, *long_context.STEPS[step], context=context
  )
  heads = max(CONFIG.num_kv_heads // (8 // num_sharing), 1)
  part = context // num_sharing * heads * CONFIG.head_dim * 2
  found = rows.largest_collective(program.compile().as_text())
  assert 0 < found < part


def test_a_page_is_shared_evenly():
  mesh = sharding.make_mesh(jax.devices()[:4], 2)
  config = shared(4, 2).config
  cache = paged.init(config, 3, 8, 'float32', mesh)
  assert cache.sharding.shard_shape(cache.keys[0].shape) == (3, 4, 8)
  with pytest.raises(errors.UserError, match='page_size=7 is no multiple of'):
    paged.init(config, 3, 7, 'float32', mesh)


PAGES = np.array([[5, 2, 0, 7, 1]], np.int32)  # of the row
_forward = jax.jit(target_forward.forward, static_argnums=1)
_logits = jax.jit(target_forward.logits_of, static_argnums=1)


def step_of(model, cache, token_ids, start):
  """Arguments of a forward over tokens from a position on."""
  sizes = ragged_batch.StepSizes(
    num_rows=1, num_tokens=16, block_size=16, context=40
  )
  counts = np.array([len(token_ids)])
  batch = ragged_batch.pack(
    sizes, np.array([start]), counts, PAGES, 8, cache.num_pages
  )
  padded = ragged_batch.padded(np.array(token_ids), 16)
  return model.params, model.config, padded, batch, cache


def feed(model, cache, token_ids, start):
  """Feeds the tokens; returns the cache and the next token."""
  hidden, cache = _forward(*step_of(model, cache, token_ids, start))
  logits = np.asarray(_logits(model.params, model.config, hidden))
  return cache, int(logits[len(token_ids) - 1].argmax())


def held(cache):
  """Where the keys and values of each device lie."""
  return {
    (i, part.device): part.data.unsafe_buffer_pointer()
    for i, pages in enumerate((*cache.keys, *cache.values))
    for part in pages.addressable_shards
  }


def test_the_number_of_devices_changes_and_no_keys_move():
  """A prompt on 8 devices, decoding on 2 of them, then on all again."""
  prompt = list(range(40, 56))
  one = testing.random_model(CONFIG)
  many, few = shared(8, 8), shared(2, 2)

  def empty(model, **options):
    return paged.init(model.config, 8, 8, 'float32', model.mesh, **options)

  expected_cache, token_id = feed(one, empty(one), prompt, 0)
  expected_ids = [token_id]
  for place in range(16, 32):
    expected_cache, token_id = feed(one, expected_cache, [token_id], place)
    expected_ids.append(token_id)

  cache, token_id = feed(many, empty(many, num_keeping=2), prompt, 0)
  found = [token_id]
  for model, places in ((few, range(16, 24)), (many, range(24, 32))):
    before = held(cache)
    cache, _ = paged.regroup(cache, model.mesh)
    after = held(cache)
    for device in jax.devices()[:2]:
      for i in range(2 * CONFIG.num_layers):
        assert after[i, device] == before[i, device]
    for place in places:
      cache, token_id = feed(model, cache, [token_id], place)
      found.append(token_id)
  assert found == expected_ids
  for pages, expected_pages in zip(
    (*cache.keys, *cache.values),
    (*expected_cache.keys, *expected_cache.values),
    strict=True,
  ):
    kept = np.asarray(pages)[PAGES, :8]
    np.testing.assert_allclose(
      kept, np.asarray(expected_pages)[PAGES], atol=1e-5
    )
    assert not np.asarray(pages)[:, 8:].any()


def test_changes_of_the_number_allocate_nothing():
  """What joins takes the memory that it has left before."""
  config = shared(8, 8).config
  meshes = {n: sharding.make_mesh(jax.devices()[:n], n) for n in (2, 4, 8)}
  cache = paged.init(config, 8, 8, 'float32', meshes[8], num_keeping=2)
  before, spare = held(cache), ()
  for number in (2, 8, 4, 2, 4, 8):
    cache, spare = paged.regroup(cache, meshes[number], spare)
    after = held(cache)
    assert len(after) == number * 2 * config.num_layers
    assert after.items() <= before.items()


def test_matrices_of_few_bits_go_to_a_part_of_the_devices():
  config = dataclasses.replace(CONFIG, weight_dtype='int8')
  many = testing.random_model(config, devices=jax.devices(), sequence_devices=8)
  few = step_devices.StepDevices(numbers=(2, 8)).models_of(many)[2]
  devices = {*jax.devices()[:2]}
  assert all(x.devices() == devices for x in jax.tree.leaves(few.params))
  assert few.params['layers'][0]['down'].sharding.device_set == devices
  found = [
    feed(
      model,
      paged.init(model.config, 8, 8, 'float32', model.mesh, num_keeping=2),
      list(range(40, 56)),
      0,
    )[1]
    for model in (few, many)
  ]
  assert found[0] == found[1]


def test_devices_that_keep_nothing_get_no_keys():
  model = shared(8, 8)
  cache = paged.init(model.config, 256, 8, 'float32', model.mesh, num_keeping=2)
  program = _forward.lower(*step_of(model, cache, [1, 2, 3], 0)).compile()
  part = cache.sharding.shard_shape(cache.keys[0].shape)
  found = rows.largest_collective(program.as_text())
  assert 0 < found < np.prod(part)


def test_devices_that_keep_tokens_stay():
  mesh = sharding.make_mesh(jax.devices()[:4], 4)
  config = shared(4, 4).config
  cache = paged.init(config, 3, 8, 'float32', mesh, num_keeping=2)
  assert cache.sharding.shard_shape(cache.keys[0].shape) == (3, 4, 16)
  for devices in (jax.devices()[:1], jax.devices()[1::-1]):
    other = sharding.make_mesh(devices, len(devices))
    with pytest.raises(errors.UserError, match='keeps tokens, and the new'):
      paged.regroup(cache, other)
  for number in (0, 5):
    with pytest.raises(errors.UserError, match=f'num_keeping={number} must be'):
      paged.init(config, 3, 8, 'float32', mesh, num_keeping=number)
  with pytest.raises(errors.UserError, match='page_size=7 is no multiple of'):
    paged.init(config, 3, 7, 'float32', mesh, num_keeping=2)


def test_tokens_are_shared_by_a_part_of_the_devices():
  for number in (0, 3):
    with pytest.raises(errors.UserError, match=f'={number} does not divide'):
      sharding.make_mesh(jax.devices()[:4], number)
