"""Slots, pages, chunks of prompts, preemption."""

import collections

import numpy as np
import pytest

from swiftspec_jax import errors, policies
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.scheduling.page_table import NO_PAGE, PageTable, keys_of
from swiftspec_jax.scheduling.scheduler import Scheduler
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig

BUCKETS = StepBuckets(
  rows=(1, 2, 4), query_tokens=(4, 8, 16, 32), lengths=tuple(range(5))
)


def make(buckets=BUCKETS, **sizes):
  sizes = {'num_pages': 64, 'max_context': 64, 'page_size': 4, **sizes}
  return Scheduler(SchedulerConfig(buckets=buckets, **sizes))


def step(scheduler, length=0, accepted=0):
  """One step in which every row has the same luck; returns plan and ended."""
  view = scheduler.begin_step()
  plan = scheduler.plan_step(view, np.broadcast_to(length, view.num_rows))
  num_accepted = np.minimum(plan.lengths, accepted)
  return plan, scheduler.commit(plan, num_accepted).tolist()


def run(scheduler, length=0, accepted=0):
  """Steps until nothing is left; returns the requests as they ended."""
  ended = []
  while scheduler.num_running or scheduler.num_waiting:
    ended += step(scheduler, length, accepted)[1]
  return ended


def used_pages(scheduler):
  return len(set(scheduler.table.pages[scheduler.table.pages >= 0].tolist()))


def test_a_request_from_prompt_to_end():
  scheduler = make()
  scheduler.submit(7, num_prompt_tokens=5, max_new_tokens=4)
  plan, ended = step(scheduler)
  assert plan.num_query_tokens.tolist() == [5]
  assert plan.is_sampled.tolist() == [True]
  assert plan.num_decoding == 0
  assert (plan.padded_rows, plan.padded_query_tokens) == (1, 8)
  assert ended == []
  view = scheduler.begin_step()
  # Three tokens are left, of which the target gives the last.
  assert view.limits.tolist() == [2]
  assert view.kv_lengths.tolist() == [5]
  plan = scheduler.plan_step(view, np.array([4]))
  assert plan.lengths.tolist() == [2]
  assert plan.num_query_tokens.tolist() == [3]
  assert scheduler.commit(plan, np.array([1])).tolist() == []
  view = scheduler.begin_step()
  assert view.kv_lengths.tolist() == [7]
  assert (view.num_verified[0], view.num_accepted[0]) == (2, 1)
  assert view.limits.tolist() == [0]
  plan = scheduler.plan_step(view, np.array([4]))
  assert scheduler.commit(plan, np.array([0])).tolist() == [7]
  assert scheduler.table.num_free == 64
  assert scheduler.begin_step() is None


def test_prompts_share_steps_with_rows_that_decode():
  """Item 33."""
  scheduler = make()
  scheduler.submit(0, 4, 30)
  step(scheduler)
  scheduler.submit(1, 40, 3)
  view = scheduler.begin_step()
  assert view.num_prefill_tokens == 31
  # The prompt would fill the step; drafts still have a small share.
  assert view.max_draft_tokens == 1
  plan = scheduler.plan_step(view, np.array([4]))
  assert plan.request_ids.tolist() == [0, 1]
  assert plan.num_query_tokens.tolist() == [2, 30]
  assert plan.is_sampled.tolist() == [True, False]
  assert plan.padded_query_tokens == 32
  scheduler.commit(plan, np.array([1, 0]))
  view = scheduler.begin_step()
  assert view.max_draft_tokens == 32 - 1 - 10
  plan = scheduler.plan_step(view, np.array([2]))
  scheduler.commit(plan, np.array([2, 0]))
  assert plan.num_query_tokens.tolist() == [3, 10]
  assert plan.is_sampled.tolist() == [True, True]
  assert plan.padded_query_tokens == 16
  view = scheduler.begin_step()
  assert view.request_ids.tolist() == [0, 1]


def test_prompts_get_what_drafts_leave_that_come_first():
  scheduler = make()
  scheduler.submit(0, 4, 30)
  step(scheduler)
  scheduler.submit(1, 40, 3)
  policy = FixedLength(4, drafts_first=True)
  view, draft_plan = policies.ask(policy, scheduler.begin_step())
  plan = scheduler.plan_step(view, draft_plan.lengths)
  assert plan.lengths.tolist() == [4, 0]
  assert plan.num_query_tokens.tolist() == [5, 27]


def test_first_come_first_served():
  scheduler = make()
  for request_id in range(9):
    scheduler.submit(request_id, 3, 5)
  assert run(scheduler) == list(range(9))


def test_a_long_request_is_not_overtaken():
  scheduler = make(num_pages=16)
  scheduler.submit(0, 30, 4)
  scheduler.submit(1, 36, 4)
  scheduler.submit(2, 3, 4)
  step(scheduler)
  assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_token_budget_counts_drafts():
  """Item 33: the longest drafts become shorter."""
  buckets = StepBuckets(rows=(4,), query_tokens=(4, 12), lengths=(0, 4))
  scheduler = make(buckets=buckets)
  for request_id in range(4):
    scheduler.submit(request_id, 1, 20)
  plan, _ = step(scheduler, [4, 4, 1, 0])
  assert plan.lengths.tolist() == [4, 3, 1, 0]
  assert plan.num_query_tokens.sum() == 12


@pytest.mark.parametrize(('num_prompt', 'room'), [(4, [3, 3]), (7, [0, 3])])
def test_drafts_get_what_memory_there_is(num_prompt, room):
  """Item 9, where a policy does not look; no row takes another's room."""
  scheduler = make(num_pages=4, page_size=4, max_context=16)
  scheduler.submit(0, num_prompt, 8)
  scheduler.submit(1, 4, 6)
  step(scheduler)
  # Two pages each, with tokens to spare after the one that is fed.
  view = scheduler.begin_step()
  assert view.num_free_pages == 0
  assert view.num_spare_tokens.tolist() == room
  plan = scheduler.plan_step(view, np.array([4, 4]))
  assert plan.lengths.tolist() == room


def test_rejected_tokens_give_their_pages_back():
  """Item 33."""
  scheduler = make(page_size=2)
  scheduler.submit(0, 4, 20)
  step(scheduler)
  view = scheduler.begin_step()
  plan = scheduler.plan_step(view, np.array([4]))
  assert used_pages(scheduler) == 5
  scheduler.commit(plan, np.array([0]))
  assert used_pages(scheduler) == 3


def test_preemption_and_resumption():
  scheduler = make(num_pages=6, page_size=4, max_context=24)
  scheduler.submit(0, 8, 16)
  scheduler.submit(1, 8, 12)
  filled = collections.Counter()
  ended, emitted = [], collections.Counter()
  while scheduler.num_running or scheduler.num_waiting:
    plan, now = step(scheduler, length=2, accepted=1)
    ended += now
    for i, request_id in enumerate(plan.request_ids.tolist()):
      if plan.is_sampled[i]:
        emitted[request_id] += 1 + min(plan.lengths[i], 1)
      if i >= plan.num_decoding:
        filled[request_id] += plan.num_query_tokens[i]
    assert used_pages(scheduler) + scheduler.table.num_free == 6
  assert scheduler.num_preemptions == 1
  assert ended == [0, 1]
  assert emitted == {0: 16, 1: 12}
  # The second one was filled again, with what it had said.
  assert filled[0] == 8
  assert filled[1] > 16


@pytest.mark.parametrize(
  'when', ['waiting', 'filling', 'decoding', 'in flight']
)
def test_cancel(when):
  """Item 33."""
  scheduler = make()
  scheduler.submit(0, 40, 9)
  scheduler.submit(1, 4, 9)
  if when != 'waiting':
    step(scheduler)
  if when in ('decoding', 'in flight'):
    step(scheduler)
  if when == 'in flight':
    view = scheduler.begin_step()
    plan = scheduler.plan_step(view, np.full(view.num_rows, 3))
    scheduler.cancel(0)
    assert scheduler.commit(plan, np.minimum(plan.lengths, 2)).tolist() == []
  else:
    scheduler.cancel(0)
  scheduler.cancel(0)
  assert run(scheduler) == [1]
  assert scheduler.table.num_free == 64
  assert (scheduler.table.pages == -1).all()


def test_an_output_that_ends_early():
  scheduler = make()
  scheduler.submit(0, 4, 30)
  scheduler.submit(1, 4, 30)
  view = scheduler.begin_step()
  plan = scheduler.plan_step(view, np.zeros(0, int))
  ended = scheduler.commit(plan, np.zeros(2, int), np.array([True, False]))
  assert ended.tolist() == [0]
  assert scheduler.num_running == 1


def test_requests_that_can_never_run_are_refused():
  scheduler = make(num_pages=8, max_context=64)
  with pytest.raises(
    errors.UserError, match=r'30 \+ 3 tokens is more than the'
  ):
    scheduler.submit(0, 30, 3)
  scheduler = make(num_pages=64, max_context=16)
  with pytest.raises(errors.UserError, match='more than the 16 tokens'):
    scheduler.submit(0, 14, 3)


def test_a_wish_of_the_request_limits_its_drafts():
  """Item 37."""
  scheduler = make()
  scheduler.submit(0, 1, 20, max_speculative_tokens=2)
  scheduler.submit(1, 1, 20, max_speculative_tokens=0)
  scheduler.submit(2, 1, 20)
  view = scheduler.begin_step()
  assert view.limits.tolist() == [2, 0, 4]
  plan = scheduler.plan_step(view, np.full(3, 4))
  assert plan.lengths.tolist() == [2, 0, 4]


def test_requests_that_begin_alike_share_full_pages():
  scheduler = make(num_pages=8)
  keys = keys_of(range(14), 4)
  other = keys_of([*range(8), 1, 1, 1, 1], 4)
  assert keys[:2] == other[:2]
  assert keys[2] != other[2]
  scheduler.submit(0, 14, 6, page_keys=keys)
  step(scheduler)
  scheduler.submit(1, 14, 1, page_keys=keys)
  scheduler.submit(2, 12, 1, page_keys=other)
  plan, ended = step(scheduler)
  assert plan.starts.tolist() == [14, 12, 8]
  assert plan.num_query_tokens.tolist() == [1, 2, 4]
  assert scheduler.num_shared_tokens == 12 + 8
  assert sorted(ended) == [1, 2]
  # The last page of 2 is free, but still holds its text.
  scheduler.submit(3, 14, 1, page_keys=other)
  plan, _ = step(scheduler)
  assert plan.starts.tolist() == [15, 12]
  assert run(scheduler) == [0]
  assert scheduler.table.num_free == 8


def test_a_text_of_full_pages_feeds_its_last_one_again():
  scheduler = make()
  for request_id in range(2):
    scheduler.submit(request_id, 8, 1, page_keys=keys_of(range(8), 4))
    plan, _ = step(scheduler)
  assert plan.starts.tolist() == [4]


def test_an_output_is_shared_as_far_as_it_is_in_the_cache():
  scheduler = make()
  text = list(range(9))
  scheduler.submit(0, 5, 4, page_keys=keys_of(text[:5], 4))
  for _ in range(3):
    plan, _ = step(scheduler)
  slot = int(plan.slots[0])
  scheduler.table.add_keys(slot, keys_of(text[4:], 4, keys_of(text, 4)[0]))
  step(scheduler)
  scheduler.submit(1, 13, 1, page_keys=keys_of([*text, 1, 2, 3, 4], 4))
  plan, _ = step(scheduler)
  assert plan.starts.tolist() == [8]


def test_memory_that_is_needed_forgets_what_was_freed_first():
  scheduler = make(num_pages=4)
  texts = [[i] * 8 for i in range(3)]
  for request_id, text in enumerate(texts):
    scheduler.submit(request_id, 8, 1, page_keys=keys_of(text, 4))
    step(scheduler)
  for request_id, (text, start) in enumerate(
    zip(texts[::-1], (4, 4, 0), strict=True), 3
  ):
    scheduler.submit(request_id, 8, 1, page_keys=keys_of(text, 4))
    plan, _ = step(scheduler)
    assert plan.starts.tolist() == [start]


def test_a_preempted_row_finds_its_pages_again():
  scheduler = make(num_pages=5)
  scheduler.submit(0, 7, 5, page_keys=keys_of(range(7), 4))
  scheduler.submit(1, 5, 7, page_keys=keys_of([9] * 5, 4))
  assert run(scheduler) == [0, 1]
  assert scheduler.num_preemptions == 1
  assert scheduler.num_shared_tokens == 4


def test_random_traffic():
  """Only declared sizes, no page lost or owned twice, every token once."""
  generator = np.random.default_rng(0)
  scheduler = make(num_pages=24, page_size=4, max_context=64)
  wanted = {i: int(generator.integers(1, 20)) for i in range(200)}
  emitted = collections.Counter()
  cancelled, ended, submitted = set(), [], 0
  while submitted < 200 or scheduler.num_running or scheduler.num_waiting:
    for _ in range(generator.poisson(0.8)):
      if submitted < 200:
        length = int(generator.integers(1, 40))
        text = [int(generator.integers(3))] * length
        scheduler.submit(
          submitted, length, wanted[submitted], page_keys=keys_of(text, 4)
        )
        submitted += 1
    if submitted and generator.random() < 0.05:
      request_id = int(generator.integers(submitted))
      scheduler.cancel(request_id)
      cancelled.add(request_id)
    view = scheduler.begin_step()
    if view is None:
      continue
    plan = scheduler.plan_step(view, generator.integers(0, 5, view.num_rows))
    assert plan.padded_rows in BUCKETS.rows
    assert plan.padded_query_tokens in BUCKETS.query_tokens
    assert plan.num_query_tokens.sum() <= plan.padded_query_tokens
    assert (plan.num_query_tokens > 0).all()
    accepted = generator.integers(0, plan.lengths + 1)
    for i in np.flatnonzero(plan.is_sampled):
      emitted[int(plan.request_ids[i])] += 1 + int(accepted[i])
    ended += scheduler.commit(plan, accepted).tolist()
    assert used_pages(scheduler) + scheduler.table.num_free == 24
  assert scheduler.num_preemptions > 5
  assert scheduler.num_shared_tokens > 200
  assert len(set(ended)) == len(ended)
  assert set(ended) | cancelled == set(range(200))
  assert all(emitted[i] == wanted[i] for i in ended)
  assert scheduler.table.num_free == 24


def test_pages():
  buckets = StepBuckets(rows=(2,), query_tokens=(2,))
  sizes = {'num_pages': 4, 'page_size': 4, 'max_context': 16}
  table = PageTable(SchedulerConfig(buckets=buckets, **sizes))
  table.own(np.array([0]), np.array([8]))
  assert table.pages[0].tolist() == [0, 1, NO_PAGE, NO_PAGE]
  table.own(np.array([1]), np.array([5]))
  assert table.num_free == 0
  with pytest.raises(ValueError, match='1 pages wanted, 0 are free'):
    table.own(np.array([0]), np.array([9]))
  table.disown(0)
  assert table.num_free == 2
  table.own(np.array([1]), np.array([16]))
  assert sorted(table.pages[1]) == [0, 1, 2, 3]
