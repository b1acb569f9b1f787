"""Suffix lookup of an engine: counts by hand, and against a search."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_test import make

from swiftspec_jax import errors
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.texts.suffix_lookup import (
  Followers,
  SuffixDrafter,
  SuffixLookup,
)

TEXTS = st.lists(
  st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=4
)


def draft(drafter, token_ids, length=4, request_id=0):
  """The draft for a row that decodes after `token_ids`, and its shares."""
  scheduler = make()
  scheduler.submit(request_id, max(len(token_ids) - 1, 1), 20)
  view = scheduler.begin_step()
  if len(token_ids) > 1:
    plan = scheduler.plan_step(view, np.zeros(view.num_rows, np.int64))
    scheduler.commit(plan, np.zeros(1, np.int64))
    view = scheduler.begin_step()
  texts = SlotTexts(
    token_ids=np.zeros((4, 64), np.int32),
    slot_generations=scheduler.slot_generations,
    page_table=scheduler.table.pages,
  )
  texts.token_ids[view.slots[0], : len(token_ids)] = token_ids
  result = drafter.draft(view, np.array([length]), texts)
  count = int(result.drafts.lengths[0])
  found = result.chains[view.slots[0], :count].tolist()
  return found, result.drafts.confidences[:count, 0].tolist()


def test_a_draft_ends_where_it_is_too_uncertain():
  lookup = SuffixLookup(min_match=1, min_confidence=0.2)
  found, shares = draft(SuffixDrafter(lookup), [0, 5, 7, 8, 9, 0])
  assert found == [5, 7]
  assert shares == [0.5, 0.5]


def test_other_requests_help_and_are_forgotten_in_turn():
  drafter = SuffixDrafter(SuffixLookup(num_past_tokens=8))
  draft(drafter, [1, 2, 3, 4, 5, 6], request_id=1)
  drafter.forget(1)
  assert draft(drafter, [9, 2, 3], request_id=2)[0] == [4, 5]
  # With this text there are nine tokens, so the oldest text goes.
  drafter.forget(2)
  assert draft(drafter, [9, 2, 3], request_id=3)[0] == []
  assert draft(drafter, [9, 2], request_id=4)[0] == [3]


def test_reset_forgets_other_requests():
  drafter = SuffixDrafter(SuffixLookup())
  draft(drafter, [1, 2, 3, 4, 5, 6], request_id=1)
  drafter.forget(1)
  drafter.reset()
  assert draft(drafter, [9, 2, 3], request_id=2)[0] == []


@settings(max_examples=60)
@given(TEXTS)
def test_drafts_are_those_of_a_search(texts):
  *past, own = texts
  lookup = SuffixLookup(min_match=1, max_match=3, min_confidence=0.05)
  drafter = SuffixDrafter(lookup)
  for request_id, text in enumerate(past):
    draft(drafter, text, request_id=request_id)
    drafter.forget(request_id)
  found, shares = draft(drafter, own, request_id=99)
  known = texts
  end, product = list(own), 1.0
  for token_id, share in zip(found, shares, strict=True):
    followers = collections.Counter()
    for size in (3, 2, 1):
      if size <= len(end) and not followers:
        for text in known:
          for place in range(len(text) - size):
            if text[place : place + size] == end[-size:]:
              followers[text[place + size]] += 1
    best = max(followers.values())
    assert token_id == min(i for i in followers if followers[i] == best)
    assert share == best / (followers.total() + 1)
    end.append(token_id)
    product *= share
    assert product >= 0.05


@given(TEXTS)
def test_what_was_added_can_be_removed(texts):
  followers = Followers(1, 3)
  for text in texts:
    followers.add(text)
  for text in texts:
    followers.remove(text)
  assert not followers._counts


def test_bad_options_are_refused():
  with pytest.raises(errors.UserError, match='min_match must be'):
    SuffixLookup(min_match=4, max_match=3)
