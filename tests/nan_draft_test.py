"""Drafts whose numbers are NaN: the output is that of plain decoding."""

import dataclasses

import jax
import numpy as np
import pytest
from decoding_cases import request_of, run
from decoding_test import markov_table
from engine_cases import results_of
from engine_tree_test import SIZE, make_sizes
from tree_cases import DEVICES, TREE

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength

# Token 0, which also fills drafts, is chosen often.
OFTEN = np.eye(SIZE)[[0, 0, 0, 1, 2, 0, 0]]
TABLE = 0.4 * markov_table(SIZE, seed=0) + 0.6 * OFTEN
TARGET = testing.table_model(TABLE)
REQUESTS = [
  request_of(
    (token_id,), max_new_tokens=24, temperature=temperature, seed=token_id
  )
  for token_id in range(5)
  for temperature in (0.0, 1.0)
]
SPOILED = {'always': list(range(SIZE)), 'at_times': [2]}


def spoiled_draft(kind, devices=None):
  """A copy of the target, but after some tokens all logits are NaN."""
  draft = testing.table_model(TABLE, name='draft', devices=devices)
  old = draft.params['embedding']
  embedding = np.array(old)
  embedding[SPOILED[kind]] = np.nan
  embedding = jax.device_put(embedding, old.sharding)
  return dataclasses.replace(
    draft, params={**draft.params, 'embedding': embedding}
  )


def tokens_of(results):
  return [result.token_ids for result in results]


@pytest.fixture(scope='module')
def plain():
  return tokens_of(run(ss.Decoder(TARGET, batch_size=4), REQUESTS))


@pytest.mark.parametrize(
  ('is_tree', 'kind'),
  [(False, 'at_times'), (True, 'always')],
  ids=['chain', 'tree'],
)
def test_engine(plain, kind, is_tree):
  draft = spoiled_draft(kind)
  if is_tree:
    draft = TreeDraft(model=draft, width=8, branching=2, prompt_lookup=False)
  engine = Engine(TARGET, draft, sizes=make_sizes(), policy=FixedLength(6))
  assert tokens_of(results_of(engine, REQUESTS)) == plain


@pytest.mark.parametrize(
  ('kind', 'mode'), [('always', 'serial'), ('at_times', 'async')]
)
def test_decoder_with_trees(plain, kind, mode):
  first, last = (jax.devices()[slice(*part)] for part in DEVICES[mode])
  target = testing.table_model(TABLE, devices=first)
  draft = spoiled_draft(kind, last)
  decoder = ss.Decoder(target, draft, batch_size=4, tree=TREE)
  assert tokens_of(run(decoder, REQUESTS)) == plain
  assert decoder.engine.drafter.rows.is_async == (mode == 'async')


def test_decoder_with_chains(plain):
  decoder = ss.Decoder(TARGET, spoiled_draft('at_times'), batch_size=4)
  greedy = REQUESTS[::2]
  assert tokens_of(run(decoder, greedy)) == plain[::2]
