"""Slots with rows of the cache: the closed batch's attention, no page table."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from attention_oracle import ancestor_mask
from engine_cases import BAD_DRAFT, RandomLengths, make_sizes, random_requests
from load_cases import check, serve
from tree_cases import CONFIG

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.engine import warm_up
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.runtime import profiling
from swiftspec_jax.step import (
  ragged_batch,
  step_input,
  target_forward,
  target_programs,
)
from swiftspec_jax.step.program_sizes import ProgramSizes

pytestmark = pytest.mark.usefixtures('no_programs')

MODEL = testing.random_model(CONFIG)
MAX_CONTEXT = 160
NUM_SLOTS, LENGTH = 3, 3
PARENTS = np.array([-1, 0, 0, 1])


# Rows alone, with their drafts, and with a chunk beside.
BUCKETS = {'rows': (NUM_SLOTS,), 'query_tokens': (3, 12, 30)}
BUCKETS |= {'lengths': tuple(range(LENGTH + 1))}
CHAINS = ProgramSizes.of_rows(StepBuckets(**BUCKETS), MAX_CONTEXT)


def read_cache(lengths):
  """A cache of `NUM_SLOTS` texts of some lengths."""
  rng = np.random.default_rng(0)
  token_ids = rng.integers(0, 256, (NUM_SLOTS, 40)).astype(np.int32)
  cache = dense.init(
    CONFIG, NUM_SLOTS, CHAINS.row_capacity, MODEL.dtype, MODEL.mesh
  )
  starts = np.zeros(NUM_SLOTS, np.int32)
  forward = jax.jit(
    decoder.forward, static_argnums=1, static_argnames='context'
  )
  _, cache = forward(
    MODEL.params, CONFIG, token_ids, cache, starts=starts, context=40
  )
  return cache.replace(kv_lengths=lengths.astype(np.int32))


@jax.jit
def run_rows(token_ids, batch, cache, is_real=None):
  return target_forward.forward(
    MODEL.params, CONFIG, token_ids.ravel(), batch, cache, is_real=is_real
  )


@pytest.mark.parametrize('kind', ['chain', 'tree'])
def test_forwards_have_the_bits_of_the_closed_batch(kind):
  lengths = np.array([5, 40, 17])
  counts = np.full(NUM_SLOTS, LENGTH + 1)
  depths = mask = None
  cache = read_cache(lengths)
  token_ids = np.arange(NUM_SLOTS * (LENGTH + 1), dtype=np.int32)
  token_ids = token_ids.reshape(NUM_SLOTS, -1)
  flat = CHAINS.mixed(NUM_SLOTS, token_ids.size, MAX_CONTEXT)
  batch, *_ = ragged_batch.pack_tokens(flat, lengths, counts, None)
  if kind == 'tree':
    depths = np.array([0, 1, 1, 2])
    mask = np.broadcast_to(ancestor_mask(PARENTS, 4), (NUM_SLOTS, 4, 4))
    batch = batch.replace(
      positions=(lengths[:, None] + depths).ravel().astype(np.int32),
      block_mask=mask,
    )
    depths = (lengths[:, None] + depths).astype(np.int32)

  @jax.jit
  def run_dense(token_ids, cache):
    return decoder.forward(
      MODEL.params,
      CONFIG,
      token_ids,
      cache,
      starts=cache.kv_lengths,
      positions=depths,
      attention_mask=mask,
    )

  want, want_cache = run_dense(token_ids, cache)
  got, got_cache = run_rows(token_ids, batch, cache)
  np.testing.assert_array_equal(got, want.reshape(got.shape))
  jax.tree.map(np.testing.assert_array_equal, got_cache, want_cache)
  if kind == 'tree':
    return
  # A twin in which a slot feeds nothing, and another one less.
  counts = np.array([2, 0, LENGTH + 1])
  batch, *_ = ragged_batch.pack_tokens(flat, lengths, counts, None)
  is_fed = (np.arange(LENGTH + 1) < counts[:, None]).ravel()
  twin, twin_cache = run_rows(token_ids, batch, cache, is_fed)
  np.testing.assert_array_equal(twin[is_fed], got[is_fed])
  for got_rows, before in zip(
    twin_cache.keys + twin_cache.values, cache.keys + cache.values, strict=True
  ):
    np.testing.assert_array_equal(
      got_rows[1, :, :MAX_CONTEXT], before[1, :, :MAX_CONTEXT]
    )


def gathers_of_caches(sizes):
  """Arrays of a cache's size that a step of drafts gathers."""
  engine = Engine(MODEL, sizes=sizes)
  flat = sizes.mixed(NUM_SLOTS, NUM_SLOTS * (LENGTH + 1), MAX_CONTEXT)
  found = []

  def note(function, *args, **options):
    if function in (target_programs.query_logits, target_programs.run_step):
      found.append(function.lower(*args, **options).as_text())
    return jax.eval_shape(functools.partial(function, **options), *args)

  engine._target._call = note
  warm_up.run_step(
    sizes, engine._target, flat, warm_up.made_up_step(flat, MAX_CONTEXT)
  )
  (text,) = found
  lines = [line for line in text.splitlines() if 'stablehlo.gather' in line]
  return [x for x in lines if f'x{CONFIG.num_kv_heads * CONFIG.head_dim}x' in x]


def test_nothing_is_gathered_of_the_cache():
  pages = make_sizes(
    num_pages=60,
    query_tokens=(12, 24),
    drafts={'rows': (NUM_SLOTS,), 'lengths': tuple(range(LENGTH + 1))},
  )
  # Of keys and values; the layers share a function.
  assert len(gathers_of_caches(pages)) == 2
  assert not gathers_of_caches(CHAINS)


def test_a_plan_has_no_pages():
  flat = CHAINS.mixed(NUM_SLOTS, 12, MAX_CONTEXT)
  step = warm_up.made_up_step(flat, MAX_CONTEXT)
  assert step_input.pack(CHAINS, flat, step, None).shape == (NUM_SLOTS, 5)


LOOKUP = ss.PromptLookup(prompt_lookup_min=1)
TREES = PersistentTrees(model=MODEL, tree=ss.TreeConfig(num_nodes=4))


@pytest.mark.parametrize(
  ('draft', 'run_ahead'),
  [(LOOKUP, 0), (LOOKUP, 2), (TREES, 0), (TREES, 1)],
  ids=['lookup', 'lookup_ahead', 'trees', 'trees_ahead'],
)
def test_outputs_are_those_of_plain_decoding(draft, run_ahead):
  """Looked up on the host, or on the devices by steps that are ahead.

  Where a model drafts trees, some are lookups alone.
  """
  options = {'looks_up': True, 'run_ahead': run_ahead}
  engine = Engine(
    MODEL, draft, sizes=CHAINS, policy=RandomLengths(0), **options
  )
  engine.programs.compile_all()
  requests = random_requests(20, seed=1)
  with profiling.count_compilations() as compilations:
    results = serve(engine, requests, seed=2)
  assert compilations.count == 0
  check(requests, results)
  assert engine.scheduler.table.num_free == NUM_SLOTS
  assert sum(result.stats.num_accepted for result in results) > 0


def test_devices_draft_what_the_host_does():
  """Counts of what was found come from the devices, with the verdicts."""
  requests = random_requests(6, seed=4)
  found = ([], [])
  for run_ahead in (0, 1):
    policy = FixedLength(LENGTH)
    engine = Engine(
      MODEL, LOOKUP, sizes=CHAINS, policy=policy, run_ahead=run_ahead
    )
    for request in requests:  # alone, so that steps are the same
      handle, records = engine.submit(request), []
      while engine.num_requests:
        records.append(engine.step())
      stats = handle.result().stats
      lengths = sum(record.lengths.sum() for record in records if record)
      found[run_ahead].append(
        (stats.drafted_per_position, stats.accepted_per_position, lengths)
      )
  assert found[1] == found[0]
  assert sum(sum(accepted) for _, accepted, _ in found[0]) > 0


def test_what_needs_pages_is_refused():
  with pytest.raises(
    errors.UserError, match='Model drafts in the pages of the'
  ):
    Engine(MODEL, BAD_DRAFT, sizes=CHAINS)
  with pytest.raises(errors.UserError, match='has_rows must be False, unless'):
    dataclasses.replace(make_sizes(), has_rows=True)
