"""When a batch waits for rows that have lost their trees."""

import numpy as np
import pytest

from swiftspec_jax.config import TreeConfig
from swiftspec_jax.policies.prediction.round_rates import RoundRates


def followed(*, num_rows, tree_tokens, draft_seconds, num_missed=1, waits=None):
  """Rates of many rounds of a second, half of them with a wait."""
  rates = RoundRates(TreeConfig(num_draft_steps=4, waits_for_misses=waits))
  for i in range(200):
    has_waited = i % 2
    num_sent = np.full(num_rows, 8)
    if not has_waited:
      num_sent[:num_missed] = 1
    rates.observe(
      num_sent,
      np.where(num_sent > 1, tree_tokens, 1),
      has_waited,
      1 + has_waited * draft_seconds,
    )
  return rates


def test_a_wait_costs_what_its_time_would_have_yielded():
  """Of 8 rows a tree gives 3 tokens, a root 1; a wait takes a quarter more.

  Rounds without a wait emit 22 tokens, others 24, in a second and 1.25 of them:
  20.4 a second. A wait costs 5.1 tokens. A new tree is one level deep, and one
  more token of each of 6 rows pays for it.
  """
  rates = followed(num_rows=8, tree_tokens=3, draft_seconds=0.25)
  assert rates.wait_from(8) == 6


@pytest.mark.parametrize(
  ('num_rows', 'draft_seconds', 'least'),
  [(1, 0.25, 1), (2, 0.01, 1), (8, 0.01, 1), (8, 0.1, 3), (8, 5.0, 8)],
)
def test_few_rows_and_fast_drafts_wait(num_rows, draft_seconds, least):
  rates = followed(
    num_rows=num_rows, tree_tokens=3, draft_seconds=draft_seconds
  )
  assert rates.wait_from(num_rows) == least


def test_trees_that_give_little_are_not_worth_a_wait():
  good, bad = (
    followed(num_rows=8, tree_tokens=tokens, draft_seconds=0.1)
    for tokens in (2, 1)
  )
  assert good.wait_from(8) < bad.wait_from(8) == 8


def test_the_user_may_choose():
  seen = {'num_rows': 8, 'tree_tokens': 3, 'draft_seconds': 0.25}
  assert followed(**seen, waits=True).wait_from(8) == 1
  assert followed(**seen, waits=False).wait_from(8) == 8
  assert followed(**seen).wait_from(0) == 1


def test_a_hiccup_changes_nothing():
  rates = followed(num_rows=8, tree_tokens=3, draft_seconds=0.25)
  num_sent = np.full(8, 8)
  rates.observe(num_sent, np.full(8, 3), 0, 1000.0)
  assert rates.wait_from(8) == 6


def test_before_all_is_timed_forwards_fill_a_verification():
  """Five forwards beside a verification: one takes a fifth of it."""
  rates = RoundRates(TreeConfig(num_draft_steps=5))
  for _ in range(200):
    rates.observe(np.full(8, 8), np.full(8, 3), 0, None)
  # A fifth of the 24 tokens of a round is 4.8.
  assert rates.wait_from(8) == 5


def test_rows_that_do_not_draft_are_held_up_too():
  rates = RoundRates(TreeConfig(num_draft_steps=10))
  num_sent = np.repeat([8, 0], [4, 16])
  for _ in range(200):
    rates.observe(num_sent, np.where(num_sent > 0, 3, 1), 0, None)
  # A tenth of the 28 tokens of a round is 2.8. Of the 12 of the first rows
  # alone it would be 1.2, and two rows enough.
  assert rates.wait_from(4) == 3
