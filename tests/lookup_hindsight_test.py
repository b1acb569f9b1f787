"""Lookups in hindsight: what they would have drafted, and what it tells."""

import dataclasses

import numpy as np
import pytest
import serving_cases as cases
import slot_rows_test
from engine_cases import random_requests
from prompt_lookup_test import oracle

import swiftspec_jax as ss
from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.texts.lookup_hindsight import LookupHindsight
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.prediction.lookup_estimator import LookupEstimator

LENGTH = 3
LOOKUP = ss.PromptLookup(num_speculative_tokens=LENGTH)


def decoded(token_ids, start, lookup=LOOKUP):
  """Counts of decoding with lookups from a place of a text on.

  Returns:
    Lookups, those that found something, and for each place of a chain how often
    it was reached, and right.
  """
  length = lookup.num_speculative_tokens
  asked = found = 0
  reached, right = [0] * length, [0] * length
  place = start
  while place < len(token_ids):
    asked += 1
    chain = oracle(token_ids[:place], lookup) or []
    found += bool(chain)
    for i, token_id in enumerate(chain):
      if place == len(token_ids):
        break
      reached[i] += 1
      if token_id != token_ids[place]:
        break
      right[i] += 1
      place += 1
    place += 1  # the target's own token
  return asked, found, reached, right


def total(told, row):
  """Returns what `decoded` does."""
  return (
    sum(x.num_asked[row] for x in told),
    sum(x.num_found[row] for x in told),
    sum(x.num_reached[:, row] for x in told).tolist(),
    sum(x.num_right[:, row] for x in told).tolist(),
  )


@pytest.mark.parametrize('seed', range(5))
def test_it_goes_through_texts_as_decoding_does(seed):
  """However many tokens come at once; two requests have one slot in turn."""
  generator = np.random.default_rng(seed)
  buckets = cases.unpadded(2, LENGTH)
  texts = SlotTexts.empty(80, np.zeros((2, 0), np.int32))
  hindsight = LookupHindsight(LOOKUP, 2)
  for request_ids in ([0, 1], [2, 3]):
    written = generator.integers(0, 3, (2, 80))
    texts.token_ids[:] = written
    lengths, told = np.array([5, 9]), []
    starts = None
    while lengths.max() < 70:
      num_new = generator.integers(1, LENGTH + 2, 2)
      view = cases.make_view(
        2, buckets, request_ids=request_ids, kv_lengths=lengths - 1
      )
      looked_up = hindsight.look_back(view, texts, np.ones(2, bool), num_new)
      lengths = lengths + num_new
      if looked_up is not None:
        told.append(looked_up)
        starts = lengths if starts is None else starts
        ends = lengths
    for row in range(2):
      text = written[row, : ends[row]].tolist()
      assert total(told, row) == decoded(text, starts[row])
    assert sum(x.num_right.sum() for x in told) > 0


def test_many_rows_have_their_turns():
  num_rows = 30
  buckets = cases.unpadded(num_rows, LENGTH)
  texts = SlotTexts.empty(600, np.zeros((num_rows, 0), np.int32))
  hindsight = LookupHindsight(LOOKUP, num_rows)
  asked = np.zeros(num_rows, int)
  for step in range(60):
    now = cases.make_view(num_rows, buckets, kv_lengths=9 * step)
    looked_up = hindsight.look_back(
      now, texts, np.ones(num_rows, bool), np.full(num_rows, 9)
    )
    assert (looked_up.num_asked > 0).sum() <= 8
    asked += looked_up.num_asked
  assert asked.min() > 0


def test_an_engine_tells_it():
  """Where lookups are followed it is what came of them."""
  lookup = dataclasses.replace(
    LOOKUP, prompt_lookup_min=1, num_speculative_tokens=slot_rows_test.LENGTH
  )
  policy = Recorder(slot_rows_test.LENGTH)
  options = {'policy': policy, 'looks_up': True, 'run_ahead': 1}
  sizes = slot_rows_test.CHAINS
  engine = Engine(slot_rows_test.MODEL, lookup, sizes=sizes, **options)
  for request in random_requests(8, seed=4):
    policy.outcomes.clear()
    handle = engine.submit(request)
    while engine.num_requests:
      engine.step()
    told = [x for x in policy.outcomes if x.looked_up is not None]
    assert told
    text = [*request.token_ids, *handle.result().token_ids]
    first, last = (
      int(x.view.kv_lengths[0] + x.num_accepted[0] + 2)
      for x in (told[0], told[-1])
    )
    counts = total([x.looked_up for x in told], 0)
    assert counts == decoded(text[:last], first, lookup)


class Recorder(FixedLength):
  def __init__(self, length):
    super().__init__(length)
    self.outcomes = []

  def observe(self, outcome):
    self.outcomes.append(outcome)


def learned(shares, acceptance):
  """Estimator of rows whose lookups find something as often as that."""
  buckets = cases.unpadded(len(shares), LENGTH)
  estimator, nothing = LookupEstimator(), np.zeros(len(shares), int)
  told = policies.LookedUp.none(LENGTH, len(shares))
  told.num_asked[:] = 10
  told.num_found[:] = 10 * np.array(shares)
  for look in range(30):
    view = cases.make_view(len(shares), buckets, step=8 * look)
    num_left = told.num_found
    for place in range(LENGTH):
      told.num_reached[place] = num_left
      num_left = told.num_right[place] = np.round(num_left * acceptance)
    outcome = cases.make_outcome(view, nothing, nothing)
    outcome = dataclasses.replace(outcome, looked_up=told)
    (estimator.observe, estimator.observe_other)[look % 2](outcome)
  return estimator, view


def test_what_nobody_drafted_is_learned():
  """By steps of its own and of another source alike."""
  estimator, view = learned([0.8], 0.5)
  assert estimator.coverage(view) == pytest.approx(0.8, abs=0.03)
  expected = 0.5 ** np.arange(1, LENGTH + 1)
  np.testing.assert_allclose(estimator.gains(view)[:, 0], expected, atol=0.06)


def test_texts_differ_in_how_often_lookups_find_something():
  estimator, view = learned([0.9, 0.1], 0.6)
  assert estimator.coverage(view) == pytest.approx(0.5, abs=0.05)
  for row, share in enumerate((0.9, 0.1)):
    own = dataclasses.replace(
      view, slots=view.slots[[row]], request_ids=view.request_ids[[row]]
    )
    assert estimator.coverage(own) == pytest.approx(share, abs=0.1)
  unknown = cases.make_view(1, view.buckets, request_ids=[77])
  assert estimator.coverage(unknown) == pytest.approx(0.5, abs=0.05)
