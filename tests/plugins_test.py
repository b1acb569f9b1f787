"""Every own policy, over an engine: the output is that of plain decoding."""

import functools

import engine_cases
import numpy as np
import pytest
import serving_cases as cases
from engine_test import alone

from swiftspec_jax.cli.flags import policy_names
from swiftspec_jax.policies.batch_table import BatchTable

DRAFTS = 'suffixes', 'tree'


@functools.cache
def make_engine(draft):
  return engine_cases.make_engine(
    engine_cases.DRAFTS[draft], chains=engine_cases.ONE_CONTEXT
  )


@functools.cache
def requests():
  return engine_cases.random_requests(8, seed=5)


@functools.cache
def expected():
  return [result.token_ids for result in alone(requests())]


@pytest.mark.parametrize('draft', DRAFTS)
@pytest.mark.parametrize('name', policy_names.names(2))
def test_outputs_are_those_of_plain_decoding(name, draft):
  engine = make_engine(draft)
  buckets = engine.scheduler.config.buckets
  costs = cases.EAGLE_8B.monotone()
  table = BatchTable.profile(costs, buckets, [0.7] * buckets.max_length, 50)
  engine.policy = policy_names.make(
    name, buckets, costs=costs, table=table, is_tree=draft == 'tree'
  )
  handles = [engine.submit(request) for request in requests()]
  num_verified = 0
  while (record := engine.step()) is not None:
    num_verified += int(np.sum(record.lengths))
  assert [handle.result().token_ids for handle in handles] == expected()
  assert (num_verified > 0) == (name != 'none')
  engine_cases.assert_empty(engine)
