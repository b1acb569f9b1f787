"""The decoder in all its modes against transformers, and on many devices."""

import dataclasses
import functools
import math
import re

import decoding_cases
import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from scipy import special

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.config.architecture import Experts
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.cache import dense, paged
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import ragged_batch, target_forward
from swiftspec_jax.step.program_sizes import ProgramSizes

GOLDEN = model_cases.golden()
IDS = model_cases.token_ids()
NUM_PREFIX = model_cases.NUM_PREFIX
NUM_NODES = len(model_cases.PARENTS)
CHAIN_MASK = np.tri(NUM_NODES, dtype=bool)[None]
ODD_CONFIG = dataclasses.replace(
  decoding_cases.CONFIG,
  vocab_size=271,
  num_layers=2,
  embed_dim=45,
  num_heads=9,
  num_kv_heads=3,
  head_dim=6,
  ffw_dim=47,
)


@functools.partial(jax.jit, static_argnames='config')
def run(params, config, token_ids, cache, starts, positions=None, mask=None):
  """Returns the logits, and the cache of a chain."""
  hidden, cache = decoder.forward(
    params,
    config,
    token_ids,
    cache,
    starts=starts,
    positions=positions,
    attention_mask=mask,
  )
  cache = dense.extend(cache, token_ids.shape[1])
  return decoder.unembed(params, config, hidden), cache


def new_cache(model, batch_size=1):
  return dense.init(model.config, batch_size, 64, model.dtype, model.mesh)


def take(model, chunk_size, token_ids):
  """Returns the logits f32[tokens, V] of a chain taken in chunks, and cache."""
  cache, logits = new_cache(model), []
  for start in range(0, len(token_ids), chunk_size):
    places = np.arange(start, min(start + chunk_size, len(token_ids)))
    starts, shape = np.array([start], np.int32), {}
    if len(places) == NUM_NODES:  # as a tree, so that one program does for both
      shape = {'positions': places[None].astype(np.int32), 'mask': CHAIN_MASK}
    new, cache = run(
      model.params,
      model.config,
      token_ids[None, places],
      cache,
      starts,
      **shape,
    )
    logits.append(np.asarray(new)[0])
  return np.concatenate(logits), cache


def chain(model, chunk_size, token_ids=IDS):
  return take(model, chunk_size, token_ids)[0]


def tree(model):
  """Returns the logits f32[nodes, V] of the tree after the prefix."""
  _, cache = take(model, NUM_NODES, IDS[:NUM_PREFIX])
  logits, _ = run(
    model.params,
    model.config,
    IDS[None, NUM_PREFIX : NUM_PREFIX + NUM_NODES],
    cache,
    np.array([NUM_PREFIX], np.int32),
    positions=NUM_PREFIX + model_cases.tree_depths()[None],
    mask=model_cases.tree_mask()[None],
  )
  return np.asarray(logits)[0]


def load_case(name, directory, seed=0, **options):
  family, changes = model_cases.CASES[name]
  testing.write_tiny_checkpoint(directory, family, seed=seed, **changes)
  return ss.load(directory, **options)


@pytest.fixture(scope='module', params=model_cases.CASES)
def case(request, tmp_path_factory):
  """Name and model."""
  directory = tmp_path_factory.mktemp(request.param)
  return request.param, load_case(request.param, directory)


def assert_same_logits(model, other, **tolerance):
  """Two models say the same in chunks and in a tree."""
  np.testing.assert_allclose(chain(model, 8), chain(other, 8), **tolerance)
  np.testing.assert_allclose(tree(model), tree(other), **tolerance)


def assert_same_as_peer(model, directory, chunk_size, token_ids=IDS):
  """So does transformers with the same checkpoint."""
  record_models = pytest.importorskip('golden.record_models')
  peer = record_models.load_peer(directory)
  np.testing.assert_allclose(
    chain(model, chunk_size, token_ids),
    record_models.chain_logits(peer, token_ids),
    atol=1e-4,
  )
  np.testing.assert_allclose(
    tree(model), record_models.tree_logits(peer, IDS), atol=1e-4
  )


def check_chain(name, model, chunk_size):
  np.testing.assert_allclose(
    model_cases.sample(chain(model, chunk_size)),
    GOLDEN['tiny'][name]['chain'],
    atol=1e-4,
  )


def test_a_chain_equals_transformers(case):
  check_chain(*case, chunk_size=8)


@pytest.mark.parametrize(
  ('name', 'chunk_size'),
  [
    ('gemma3_text', 1),
    ('llama4', len(IDS)),
    ('gpt_oss', 1),
    ('gemma4_text', len(IDS)),
  ],
)
def test_chunks_of_other_sizes_equal_transformers(name, chunk_size, tmp_path):
  check_chain(name, load_case(name, tmp_path), chunk_size)


def test_a_tree_equals_transformers(case):
  name, model = case
  np.testing.assert_allclose(
    model_cases.sample(tree(model)), GOLDEN['tiny'][name]['tree'], atol=1e-4
  )


@pytest.mark.parametrize(
  'name', ['llama4', 'gemma4_text', 'gemma4_layer_inputs']
)
def test_a_tree_in_pages_equals_a_dense_one(name, tmp_path):
  """Chunks of Llama 4 begin inside of it."""
  model = load_case(name, tmp_path)
  page_size, num_pages = 8, 4
  context = num_pages * page_size
  sizes = ragged_batch.StepSizes(
    num_rows=1, num_tokens=NUM_NODES, block_size=NUM_NODES, context=context
  )

  def batch(start, mask, positions):
    table = np.arange(num_pages)[None]
    row = np.array([start]), np.array([NUM_NODES]), table
    packed = ragged_batch.pack(sizes, *row, page_size, num_pages)
    return packed.replace(positions=positions, block_mask=mask)

  @jax.jit
  def run_paged(token_ids, batch, cache):
    hidden, cache = target_forward.forward(
      model.params, model.config, token_ids, batch, cache
    )
    return decoder.unembed(model.params, model.config, hidden[None])[0], cache

  cache = paged.init(
    model.config, num_pages, page_size, model.dtype, model.mesh
  )
  for start in range(0, NUM_PREFIX, NUM_NODES):
    positions = np.arange(start, start + NUM_NODES, dtype=np.int32)
    chunk = batch(start, CHAIN_MASK, positions)
    _, cache = run_paged(IDS[positions], chunk, cache)
  nodes = batch(
    NUM_PREFIX,
    model_cases.tree_mask()[None],
    NUM_PREFIX + model_cases.tree_depths(),
  )
  token_ids = IDS[NUM_PREFIX : NUM_PREFIX + NUM_NODES]
  logits, _ = run_paged(token_ids, nodes, cache)
  np.testing.assert_allclose(logits, tree(model), atol=1e-5)


def test_the_cases_differ():
  samples = [np.ravel(golden['chain']) for golden in GOLDEN['tiny'].values()]

  # Mistral without a window is Llama, and the 12b is as the 31b.
  assert len(set(map(tuple, samples))) == len(model_cases.CASES) - 2


@pytest.mark.parametrize('name', ['llama', 'gemma3_text'])
def test_rows_at_different_positions_do_not_meet(name, tmp_path):
  model = load_case(name, tmp_path)
  starts = np.array([0, 9, 21], np.int32)
  cache = new_cache(model, batch_size=3)
  prefixes = np.stack([np.roll(IDS, -row) for row in range(3)])
  for start in (0, 8, 16):
    chunk, places = prefixes[:, start : start + 8], np.full(3, start, np.int32)
    _, cache = run(model.params, model.config, chunk, cache, places)
  pairs = zip(prefixes, starts, strict=True)
  new = np.stack([row[start : start + 8] for row, start in pairs])
  logits, _ = run(model.params, model.config, new, cache, starts)
  for row, start in enumerate(starts):
    alone = chain(model, 8, prefixes[row])[start : start + 8]
    np.testing.assert_allclose(logits[row], alone, atol=2e-5)


@pytest.mark.parametrize('name', ['llama', 'gemma3_text'])
def test_bfloat16_is_close(name, tmp_path):
  wide = chain(load_case(name, tmp_path), 8)
  narrow = chain(load_case(name, tmp_path, dtype=jnp.bfloat16), 8)
  assert np.abs(narrow - wide).max() < 0.1 * np.abs(wide).max()
  assert np.abs(narrow - wide).mean() < 0.02 * np.abs(wide).max()


def axis_sizes(model):
  """Yields each parameter's shape, that on one device, and its spec."""

  def is_transposed(leaf):
    return isinstance(leaf, transposed.TransposedMatrix)

  leaves = jax.tree.leaves(model.params, is_leaf=is_transposed)
  specs = jax.tree.leaves(params_lib.param_specs(model.config))
  for leaf, spec in zip(leaves, specs, strict=True):
    array = leaf.values if is_transposed(leaf) else leaf
    (part,) = {shard.data.shape for shard in array.addressable_shards}
    whole = array.shape
    if is_transposed(leaf):
      after = leaf.in_shape[1:]
      part = part[-1] // math.prod(after), *after, *part[:-1]
      whole = *leaf.in_shape, *whole[:-1]
    yield whole, part, spec


@pytest.mark.parametrize(
  ('num_devices', 'name'),
  [
    (2, 'qwen2'),
    (4, 'qwen3_moe'),  # its six experts are padded
    (6, 'llama_odd_sizes'),  # most is padded
    (6, 'gemma3_text'),
    (6, 'gpt_oss'),
    (6, 'llama4'),
    (6, 'gemma4_experts'),
  ],
)
def test_many_devices_equal_one(name, num_devices, tmp_path):
  one = load_case(name, tmp_path)
  many = ss.load(tmp_path, devices=jax.devices()[:num_devices])
  # One CPU adds up norms and products in another order.
  assert_same_logits(many, one, atol=2e-5)
  for whole_shape, shape, spec in axis_sizes(many):
    for size, padded, whole, axis in zip(
      shape, whole_shape, spec.shape, spec.axes, strict=True
    ):
      num_parts = num_devices if axis in sharding.RULES else 1
      assert size == math.ceil(whole / num_parts)
      assert padded == size * num_parts


def step_text(model):
  """Returns the compiled text of one plain decoding step."""
  buckets = StepBuckets(rows=(1,), query_tokens=(1, 8))
  engine = Engine(model, sizes=ProgramSizes.of_rows(buckets, 64))
  texts = []

  def note(function, *args, **options):
    lowered = function.lower(*args, **options)
    texts.append(lowered.compile().as_text())
    return lowered.out_info

  engine._target._call = note
  engine.enqueue_trial(engine.sizes.plain(1, 64), 5)
  (text,) = texts
  return text


@pytest.mark.parametrize(
  'experts', [None, Experts(num_experts=4, num_active=2, ffw_dim=256)]
)
def test_no_weights_travel_between_devices(experts):
  config = dataclasses.replace(
    ODD_CONFIG,
    embed_dim=64,
    ffw_dim=256,
    num_kv_heads=9,
    vocab_size=512,
    experts=experts,
  )
  text = step_text(testing.random_model(config, devices=jax.devices()[:4]))
  # After the attention and after the feed-forward layer of each layer.
  assert len(re.findall(r' all-reduce(?:-start)?\(', text)) >= 4
  gathered = re.findall(r'= (\S+) all-gather(?:-start)?\(', text)
  shapes = re.findall(r'\[([\d,]+)\]', ' '.join(gathered))
  sizes = [math.prod(map(int, shape.split(','))) for shape in shapes]
  assert all(size <= config.vocab_size for size in sizes), gathered


def test_random_weights_are_the_same_on_any_number_of_devices():
  one = testing.random_model(ODD_CONFIG)
  four = testing.random_model(ODD_CONFIG, devices=jax.devices()[:4])
  specs = params_lib.param_specs(four.config)
  for alone, padded, spec in zip(
    jax.tree.leaves(transposed.undone(jax.device_get(one.params))),
    jax.tree.leaves(transposed.undone(jax.device_get(four.params))),
    jax.tree.leaves(specs),
    strict=True,
  ):
    padded, inner = padded.copy(), tuple(map(slice, spec.shape))
    np.testing.assert_array_equal(padded[inner], alone)
    padded[inner] = 0
    assert not padded.any()


def test_random_weights_keep_activations_in_range():
  logits = chain(testing.random_model(ODD_CONFIG), len(IDS))
  assert 0.1 < logits.std() < 10


def test_a_table_model_has_the_distributions_of_its_table():
  table = np.random.default_rng(0).dirichlet(np.ones(7), 7)
  table[2, 3] += table[2, 4]
  table[2, 4] = 0
  model = testing.table_model(table)
  logits = chain(model, 7, np.arange(7, dtype=np.int32))
  distributions = special.softmax(logits, axis=-1)
  np.testing.assert_allclose(distributions, table, atol=1e-6)
  assert distributions[2, 4] == 0
  assert model.tokenizer.encode('abcg') == [0, 1, 2, 6]
  assert model.tokenizer.decode([0, 1, 2, 6]) == 'abcg'


@pytest.mark.parametrize(
  ('table', 'message'),
  [
    (np.ones((2, 3)) / 3, 'square'),
    (np.ones((2, 2)), 'sum to 1'),
    (np.array([[2.0, -1.0], [0.5, 0.5]]), 'sum to 1'),
  ],
)
def test_a_table_must_hold_distributions(table, message):
  with pytest.raises(ss.UserError, match=message):
    testing.table_model(table)


def test_tiny_checkpoints_of_unknown_kind(tmp_path):
  with pytest.raises(ss.UserError, match="unknown family 'gpt2'"):
    testing.write_tiny_checkpoint(tmp_path, 'gpt2')
  with pytest.raises(ss.UserError, match='at least 262, got 256'):
    testing.write_tiny_checkpoint(tmp_path, vocab_size=256)


@pytest.mark.peers
@pytest.mark.parametrize(
  'name',
  ['gpt_oss', 'llama4', 'qwen3_moe', 'gemma4_experts', 'gemma4_layer_inputs'],
)
def test_what_transformers_saves_is_read(name, tmp_path):
  """A model that is made and saved by their code, in steps with their cache."""
  record_models = pytest.importorskip('golden.record_models')
  load_case(name, tmp_path)
  peer = record_models.save_random(tmp_path)
  np.testing.assert_allclose(
    chain(ss.load(tmp_path), 1), record_models.step_logits(peer, IDS), atol=1e-4
  )


@pytest.mark.peers
@pytest.mark.parametrize('seed', [1, 2])
@pytest.mark.parametrize('name', model_cases.CASES)
def test_equals_transformers_live(name, seed, tmp_path):
  model = load_case(name, tmp_path, seed)
  token_ids = np.random.default_rng(seed).integers(0, 262, len(IDS))
  assert_same_as_peer(model, tmp_path, len(IDS), token_ids.astype(np.int32))
