"""The bound of what a draft lacks, against a count of every token."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec_jax.pipelines.draft_lag import DraftLag

MOST = 8
ROUND = st.tuples(st.booleans(), st.booleans(), st.integers(1, MOST))


@settings(max_examples=300, deadline=None)
@given(rounds=st.lists(ROUND, max_size=60), run_ahead=st.integers(0, 2))
def test_bounds_what_is_missing_and_is_exact_once_all_is_read(
  rounds, run_ahead
):
  lag, missing, in_flight = DraftLag(), 0, collections.deque()
  for is_missed, catches_up, num_tokens in rounds:
    if is_missed:
      lag.note_missed(MOST)
      missing += num_tokens
    else:
      lag.note_followed()
    in_flight.append(num_tokens)
    if catches_up:
      lag.note_caught_up(1)
      missing = 1
    assert lag.bound >= missing
    while len(in_flight) > run_ahead:
      lag.read([1, in_flight.popleft()])
    assert missing <= lag.bound <= missing + run_ahead * (MOST - 1)
