"""Devices that share the tokens of a sequence: equal tokens, no KV moves."""

import dataclasses
import functools

import jax
import pytest
from decoding_cases import CONFIG, requests_of, run, sizes_of
from engine_cases import FEW, TARGET, make_engine, results_of

import swiftspec_jax as ss
from experiments.aot import rows
from experiments.aot.steps import Step
from swiftspec_jax import errors, testing
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.models.cache import paged
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import ahead_of_time, target_programs

NUM_NODES = 16


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
  ('has_tree', 'num_devices', 'num_sharing'), [(False, 8, 8), (True, 4, 2)]
)
def test_tokens_are_those_of_one_device(has_tree, num_devices, num_sharing):
  model = shared(num_devices, num_sharing)
  draft = TreeDraft(model=model, width=3, branching=3) if has_tree else None
  engine = make_engine(draft, FixedLength(3), FEW, model)
  requests = requests_of(3, max_new_tokens=24)
  results = results_of(engine, requests)
  assert [result.token_ids for result in results] == expected()


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


def step_of(kind, num_sharing, context):
  """Returns a step of one row over pages that all devices hold."""
  page_size = 16 * num_sharing
  return Step(
    kind=kind,
    sizes=sizes_of(
      context // page_size,
      context,
      page_size,
      rows=(1,),
      query_tokens=(NUM_NODES, context),
      lengths=(0, NUM_NODES - 1),
    ),
    config=dataclasses.replace(
      CONFIG, num_shards=8, num_sequence_shards=num_sharing
    ),
    mesh=sharding.make_mesh(jax.devices(), num_sharing),
  )


def parts_of(step):
  """Returns the programs of a step over pages, by their functions."""
  found = {}

  def call(fn, *args, **options):
    found[fn.__name__] = fn.lower(*args, **options)
    return ahead_of_time.compile_only(fn, *args, **options)

  args, options = step.arguments()
  target_programs.run_parts(call, *args, **options)
  return found


@pytest.mark.parametrize(
  ('kind', 'num_sharing'), [('plain', 8), ('tree', 2), ('tree', 8)]
)
def test_no_keys_or_values_are_exchanged(kind, num_sharing):
  """What the largest collective carries is less than a device's part of them.

  That is the logits, whatever the context.
  """
  context = 8192
  step = step_of(kind, num_sharing, context)
  heads = max(CONFIG.num_kv_heads // (8 // num_sharing), 1)
  part = context // num_sharing * heads * CONFIG.head_dim * 2
  found = {
    name: rows.largest_collective(program.compile().as_text())
    for name, program in parts_of(step).items()
  }
  assert 0 < found['query_logits'] < part
  assert max(found.values()) < part


def test_a_page_is_shared_evenly():
  mesh = sharding.make_mesh(jax.devices()[:4], 2)
  config = shared(4, 2).config
  cache = paged.init(config, 3, 8, 'float32', mesh)
  assert cache.sharding.shard_shape(cache.keys[0].shape) == (3, 4, 8)
  with pytest.raises(errors.UserError, match='page_size=7 is no multiple of'):
    paged.init(config, 3, 7, 'float32', mesh)


def test_tokens_are_shared_by_a_part_of_the_devices():
  for number in (0, 3):
    with pytest.raises(errors.UserError, match=f'={number} does not divide'):
      sharding.make_mesh(jax.devices()[:4], number)
