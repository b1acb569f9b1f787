"""What a draft model takes in, a chunk a step: by hand."""

import dataclasses

import engine_cases
import numpy as np
import pytest
import serving_cases as cases
from decoding_cases import request_of, run

import swiftspec_jax as ss
from swiftspec_jax.drafters.models.draft_prefill import DraftPrefill
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput

GENERATIONS = np.ones(4, np.int64)
BUCKETS = cases.unpadded(4, max_length=2, max_query_tokens=10)


def view_of(kv_lengths, **fields):
  return cases.make_view(
    len(kv_lengths), BUCKETS, kv_lengths=kv_lengths, **fields
  )


def step(draft_prefill, kv_lengths, lengths):
  """Chunks of a step, and for which rows it drafts."""
  view = view_of(kv_lengths)
  num_late = draft_prefill.num_unread_tokens(view, GENERATIONS)
  plan = draft_prefill.plan(view, np.array(lengths))
  draft_prefill.take(view, plan)
  return num_late, plan.chunks.tolist(), plan.is_ready.tolist()


def test_a_step_takes_in_one_chunk():
  draft_prefill = DraftPrefill(BUCKETS)
  # The row that misses least comes first, and is ready at once.
  assert step(draft_prefill, [25, 7], [2, 2]) == (32, [3, 7], [False, True])
  assert step(draft_prefill, [25, 8], [2, 2]) == (22, [10, 0], [False, True])
  # A row that is not asked for waits.
  assert step(draft_prefill, [25, 9], [0, 2]) == (12, [0, 0], [False, True])
  assert step(draft_prefill, [25, 10], [2, 2]) == (12, [10, 0], [False, True])
  # The rest is no more than what an accepted draft leaves.
  assert step(draft_prefill, [25, 11], [2, 2]) == (0, [0, 0], [True, True])
  assert step(draft_prefill, [26, 12], [2, 2]) == (0, [0, 0], [True, True])


def test_tokens_of_accepted_drafts_are_there_already():
  draft_prefill = DraftPrefill(BUCKETS)
  assert step(draft_prefill, [7], [2])[1] == [7]
  draft_prefill.keep(view_of([7]), np.array([2]))
  # Two tokens were kept, and the last known one comes with the draft.
  assert draft_prefill.num_unread_tokens(view_of([13]), GENERATIONS) == 3


def test_rows_share_the_first_forward():
  """With the last known tokens, four rows would have 12 tokens of 10 in it."""
  found = step(DraftPrefill(BUCKETS), [2] * 4, [2] * 4)
  assert found == (2, [0, 0, 0, 2], [True] * 4)


def test_a_prompt_delays_no_other_row():
  """A long prompt is taken in while the row beside it is drafted for."""
  target = engine_cases.TARGET
  sizes = engine_cases.make_sizes(
    query_tokens=(16,), drafts={**engine_cases.CHAINS, 'rows': (4,)}
  )
  engine = Engine(target, target, sizes=sizes, policy=FixedLength(1))
  requests = [
    request_of(range(size), max_new_tokens=30, ignore_eos=True)
    for size in (2, 60)
  ]
  handles = [engine.submit(request) for request in requests]
  records = list(iter(engine.step, None))
  decoder = ss.Decoder(target, batch_size=2)
  for handle, plain in zip(handles, run(decoder, requests), strict=True):
    assert handle.result().token_ids == plain.token_ids
  # 59 tokens of the prompt, 5 of the other row that had no room for drafts
  # beside it, and a token of output for each chunk of 16.
  chunks = [record for record in records if record.prefills_draft]
  assert len(chunks) == 5
  # Meanwhile there are drafts for the other row alone.
  for record in chunks[:-1]:
    assert record.draft_plan.lengths.tolist() == [1, 0]
  assert chunks[-1].draft_plan.lengths.tolist() == [1, 1]


def test_goodput_waits_for_a_text_that_is_worth_it():
  """Costs of a chunk are spread over the steps in which it is of use."""
  length = BUCKETS.max_length

  def planned(draft_prefill, num_unread_tokens):
    costs = cases.linear_costs(fixed=0.01, steps=0.001)
    draft = dataclasses.replace(costs.draft, draft_prefill=draft_prefill)
    policy = Goodput(dataclasses.replace(costs, draft=draft))
    return policy.plan_draft(
      cases.make_view(1, BUCKETS, num_unread_tokens=num_unread_tokens)
    )

  without, late = planned(0.05, 0), planned(0.05, 10)
  assert without.lengths.tolist() == late.lengths.tolist() == [length]
  # The step takes all of the time, however it is charged.
  difference = late.expected_seconds - without.expected_seconds
  assert difference == pytest.approx(0.05)
  # A text that takes as long as a hundred steps is not worth it.
  assert planned(5.0, 10).lengths.tolist() == [0]
