"""On one CPU the logits of a token have the same bits in any company.

It may be alone, in a chain, in a tree with any other nodes between, in a batch,
in a chunk of a prompt, in rows and in pages. So speculative outputs equal plain
ones in every dtype, not only where rounding happens to hide the order of sums.
"""

import dataclasses
import functools

import decoding_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_cases import request_of, sizes_of

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder
from swiftspec_jax.models.cache import dense, paged
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.step import ragged_batch, target_forward

CONFIG = dataclasses.replace(
  decoding_cases.CONFIG,
  vocab_size=263,
  num_layers=2,
  embed_dim=40,
  num_heads=6,
  head_dim=16,
  ffw_dim=72,
  max_context=128,
)
NUM_KNOWN, NUM_NEW, NUM_NODES = 21, 4, 9
DTYPES = {
  'float32': (jnp.float32, None),
  'bfloat16': (jnp.bfloat16, None),
  'int8_dynamic': (jnp.float32, 'int8_dynamic'),
  'int8_dynamic16': (jnp.bfloat16, 'int8_dynamic16'),
  'int8': (jnp.float32, 'int8'),
}
OF_FILES = {
  **DTYPES,
  'stored': (jnp.float32, 'stored'),
  'int4': (jnp.bfloat16, 'int4'),
}


def random_tree(rng, places):
  """Returns bool[T, T] and depths of a tree with a chain at some places."""
  mask = np.eye(NUM_NODES, dtype=bool)
  for node in range(1, NUM_NODES):
    parent = rng.integers(node)
    if node in places:
      parent = places[list(places).index(node) - 1]
    mask[node] |= mask[parent]
  return mask, mask.sum(axis=1) - 1


def make_run(model):
  """Returns a program that feeds tokens to rows of a cache."""

  @functools.partial(jax.jit, static_argnames='context')
  def run(params, tokens, cache, **options):
    hidden, cache = decoder.forward(
      params, model.config, tokens, cache, starts=cache.kv_lengths, **options
    )
    return decoder.unembed(params, model.config, hidden), cache

  return functools.partial(run, model.params)  # no constants of a program


def check(model, seed):
  """Compares logits of a chain that is fed in several ways."""
  rng = np.random.default_rng(seed)
  known, chain, others = (
    rng.integers(model.config.vocab_size, size=size, dtype=np.int32)
    for size in (NUM_KNOWN, NUM_NEW, NUM_NODES)
  )
  run = make_run(model)

  def empty(batch_size):
    size = NUM_KNOWN + NUM_NODES
    return dense.init(model.config, batch_size, size, model.dtype, model.mesh)

  def filled(batch_size):
    # Other numbers of rows than the single tokens have, as chunks of prompts.
    tokens = np.tile(known[None], (batch_size, 1))
    _, cache = run(tokens, empty(batch_size), context=NUM_KNOWN)
    return dense.extend(cache, NUM_KNOWN)

  want, cache = [], empty(1)
  for token in (*known, *chain):
    logits, cache = run(token[None, None], cache)
    cache = dense.extend(cache, 1)
    want.append(np.asarray(logits)[0, 0])
  check_pages(model, np.concatenate([known, chain]), want, rng)
  want = want[NUM_KNOWN:]
  padded = np.append(chain, others[NUM_NEW:])[None]
  is_real = np.arange(NUM_NODES)[None] < NUM_NEW
  logits, _ = run(padded, filled(1), is_real=is_real)
  np.testing.assert_array_equal(logits[0, :NUM_NEW], want)
  assert not logits[0, NUM_NEW:].any()  # no work was done for padding
  for batch_size in (1, 3):
    places = [0, *np.sort(rng.permutation(np.arange(1, NUM_NODES))[:3])]
    mask, depths = random_tree(rng, places)
    nodes = others.copy()
    nodes[places] = chain

    def copies(x, batch_size=batch_size):
      return np.tile(x[None], (batch_size, *[1] * x.ndim))

    positions = copies((NUM_KNOWN + depths).astype(np.int32))
    shape = {'positions': positions, 'attention_mask': copies(mask)}
    logits, _ = run(copies(nodes), filled(batch_size), **shape)
    np.testing.assert_array_equal(np.asarray(logits)[-1, places], want)


# Tokens that three requests feed in each step, all of the same text: chunks,
# single tokens, and a draft and a chunk beside a row that decodes.
STEPS = ((16, 22, 0), (1, 1, 1), (8, 1, 5))
PAGE_SIZE, BLOCK_SIZE, NUM_COLUMNS = 8, 8, 5


def check_pages(model, text, want, rng):
  """Feeds the text to three requests over pages, and a tree after it."""
  config = model.config
  num_pages = 3 * NUM_COLUMNS + 2
  table = rng.permutation(num_pages)[: 3 * NUM_COLUMNS].reshape(3, -1)

  @jax.jit
  def run(params, tokens, batch, cache, is_real=None):
    hidden, cache = target_forward.forward(
      params, config, tokens, batch, cache, is_real=is_real
    )
    return target_forward.logits_of(params, config, hidden), cache

  def packed(starts, counts, rows, num_padding=0):
    sizes = ragged_batch.StepSizes(
      num_rows=len(rows),
      num_tokens=int(counts.sum()) + num_padding,
      block_size=1 if counts.max() == 1 else BLOCK_SIZE,
      context=NUM_COLUMNS * PAGE_SIZE,
    )
    return ragged_batch.pack(
      sizes, starts, counts, table[rows].astype(np.int32), PAGE_SIZE, num_pages
    )

  cache = paged.init(config, num_pages, PAGE_SIZE, model.dtype, model.mesh)
  done = np.zeros(3, int)
  for counts in map(np.array, STEPS):
    (rows,) = np.nonzero(counts)
    starts, counts = done[rows], counts[rows]
    index = np.concatenate(
      [np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
    )
    num_padding = 5 if counts.max() > 1 else 0
    batch = packed(starts, counts, rows, num_padding)
    tokens = np.pad(text[index], (0, num_padding))
    is_real = np.arange(len(tokens)) < len(index)
    logits, cache = run(model.params, tokens, batch, cache, is_real)
    np.testing.assert_array_equal(
      logits[: len(index)], [want[i] for i in index]
    )
    assert not logits[len(index) :].any()  # no work was done for padding
    done[rows] += counts
  # The last known token and the end of the text, with other nodes between.
  (start,) = starts = done[:1] - NUM_NEW
  places = np.array([0, 2, 3, 6])
  mask, depths = random_tree(rng, places)
  mask, depths = mask[:BLOCK_SIZE, :BLOCK_SIZE], depths[:BLOCK_SIZE]
  nodes = rng.integers(config.vocab_size, size=BLOCK_SIZE, dtype=np.int32)
  nodes[places] = text[start : start + NUM_NEW]
  batch = packed(starts, np.array([BLOCK_SIZE]), np.array([0])).replace(
    positions=(start + depths).astype(np.int32), block_mask=mask[None]
  )
  logits, _ = run(model.params, nodes, batch, cache)
  np.testing.assert_array_equal(
    np.asarray(logits)[places], want[start : start + NUM_NEW]
  )


@pytest.mark.parametrize(
  ('name', 'has_norms'),
  [*((name, False) for name in DTYPES), ('float32', True), ('bfloat16', True)],
)
def test_of_a_tiny_model(name, has_norms):
  dtype, weight_dtype = DTYPES[name]
  config = dataclasses.replace(
    CONFIG, weight_dtype=weight_dtype, use_qk_norm=has_norms
  )
  check(testing.random_model(config, dtype=dtype), seed=0)


@pytest.mark.optimised
@pytest.mark.parametrize('name', OF_FILES)
def test_of_a_real_model(name):
  dtype, weight_dtype = OF_FILES[name]
  model = ss.load(
    'smollm2-135m-instruct',
    num_layers=4,  # optimised programs of all take minutes to compile
    dtype=dtype,
    weight_dtype=weight_dtype,
    devices=jax.devices()[:1],
    kernels='native',
  )
  check(model, seed=1)


@pytest.mark.parametrize('name', ['bfloat16', 'int8_dynamic16'])
def test_of_requests_that_give_up_their_pages(name):
  """They read their texts again, in other chunks, beside other requests."""
  dtype, weight_dtype = DTYPES[name]
  config = dataclasses.replace(CONFIG, weight_dtype=weight_dtype)
  model = testing.random_model(config, dtype=dtype)
  rng = np.random.default_rng(0)
  requests = [
    request_of(rng.integers(256, size=size).tolist(), max_new_tokens=40)
    for size in (5, 23, 30, 37, 44)
  ]
  lengths = (0, 1, 2, 3)
  sizes = sizes_of(24, 96, 8, rows=(4,), query_tokens=(24,), lengths=lengths)
  draft = ss.PromptLookup(prompt_lookup_min=1)
  engine = Engine(model, draft, sizes=sizes, policy=FixedLength(3))
  handles = [engine.submit(request) for request in requests]
  while engine.step():
    pass
  assert engine.scheduler.num_preemptions > 0
  for request, handle in zip(requests, handles, strict=True):
    *_, last = ss.Decoder(model).run([request])
    assert handle.result().token_ids == last.result.token_ids
    assert handle.result().stats.num_accepted > 0
