"""Drafts of serving in `Decoder` and `generate`: the same outputs as plain."""

import functools

import engine_cases
import numpy as np
import pytest
from decoding_cases import CONFIG, assert_same, requests_of, run
from structured_outputs_test import RECORD, request_of

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.drafters import engine_drafter, make_drafter
from swiftspec_jax.drafters.device_drafter import OnDevices
from swiftspec_jax.drafters.forced_draft import ForcedDraft
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.drafters.models.model_spec import ModelSpec
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.drafters.spec import DraftSpec
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.prediction.live_costs import LiveCosts

MODEL = testing.random_model(CONFIG)
TREE = ss.TreeConfig(num_nodes=5, width=2, num_draft_steps=2, branching=3)


class Repeats(engine_drafter.HostDrafter):
  """Drafts the last token again."""

  name = 'repeats'

  def draft(self, view, lengths, texts):
    found = {
      row: texts.known_from(view, row, 0)[-1:] * int(lengths[row])
      for row in np.flatnonzero(lengths).tolist()
    }
    return engine_drafter.chains_of(view, texts, found)


def goodput(buckets):
  return Goodput(LiveCosts(buckets, drafts_by_model=False))


# The target's programs for drafts of one length are the same.
LENGTH = {'num_speculative_tokens': 4}
# What `Decoder` is told of each draft.
DRAFTS = {
  'suffix_lookup': {'draft': ss.SuffixLookup(), **LENGTH},
  'datastore': {'draft': ss.Datastore(), **LENGTH},
  'grammar': {'draft': ss.GrammarDraft(), **LENGTH},
  'self': {'draft': ss.SelfDraft(window=16), **LENGTH},
  'forced': {'draft': ForcedDraft(acceptance=1.0), **LENGTH},
  'repeats': {'draft': Repeats(), **LENGTH},
  'tree': {'draft': TreeDraft(model=MODEL, width=2, branching=3), **LENGTH},
  'chain_of_features': {'draft': engine_cases.READING_DRAFT},
  'persistent_trees': {'draft': PersistentTrees(model=MODEL, tree=TREE)},
  # With a policy, all that an `Engine` takes.
  'prompt_lookup': {'draft': ss.PromptLookup(**LENGTH), 'policy': goodput},
  'chain': {'draft': MODEL, 'policy': FixedLength(2)},
  'none': {'policy': FixedLength(3)},
}
TREES = 'datastore', 'tree', 'persistent_trees'
# Drafts that know little.
MAY_BE_WRONG = 'repeats', 'none', 'chain_of_features', 'grammar'


@functools.cache
def plain():
  return run(ss.Decoder(MODEL), requests_of(5))


@functools.cache
def records():
  """Greedy and drawn records, and what plain decoding says of them."""
  requests = [
    request_of(RECORD, seed=i, temperature=i / 2, max_new_tokens=40)
    for i in range(2)
  ]
  return requests, run(ss.Decoder(MODEL, batch_size=2), requests)


@pytest.mark.parametrize('name', DRAFTS)
def test_outputs_are_those_of_plain_decoding(name):
  decoder = ss.Decoder(MODEL, batch_size=2, **DRAFTS[name])
  if name == 'forced':  # drafts what was written before
    run(decoder, requests_of(5))
  got = run(decoder, requests_of(5))
  assert_same(got, plain())
  stats = [result.stats for result in got]
  assert sum(s.num_accepted for s in stats) > 0 or name in MAY_BE_WRONG
  for s in stats:
    sizes = np.arange(len(s.chosen_lengths))
    assert sizes @ s.chosen_lengths == s.num_drafted
    assert sum(s.chosen_lengths) == s.num_rounds
    num_drafts = s.num_rounds - s.num_plain_rounds
    assert s.num_tree_rounds == (num_drafts if name in TREES else 0)
    num_verdicts = s.num_hits + s.num_late_hits + s.num_misses
    assert (num_verdicts > 0) == (name == 'persistent_trees' and num_drafts > 1)
  requests, expected = records()
  assert_same(run(decoder, requests), expected)


def test_no_draft_of_serving_is_left_out():
  specs = [
    make_drafter.spec_of(options.get('draft'), options.get('tree'))
    for options in DRAFTS.values()
  ]
  kinds = {*DraftSpec.__subclasses__(), *ModelSpec.__subclasses__()}
  left_out = {
    kind for kind in kinds if not any(isinstance(x, kind) for x in specs)
  }
  assert left_out == {OnDevices}  # extend_test has it


def test_rooms_grow_with_the_requests():
  decoder = ss.Decoder(MODEL, batch_size=2, **DRAFTS['suffix_lookup'])
  short = ss.Request(
    token_ids=(1, 2, 3), sampling=ss.SamplingParams(max_new_tokens=5)
  )
  (before,) = run(decoder, [short])
  events = decoder.run(requests_of(2))
  next(events)
  with pytest.raises(ss.UserError, match='busy with another iterator'):
    next(decoder.run([short]))
  events.close()  # cancels them
  (after,) = run(decoder, [short])
  assert after.token_ids == before.token_ids


def test_what_does_not_fit_into_the_rounds_is_refused():
  draft = TreeDraft(model=MODEL, width=2, branching=2, num_draft_steps=2)
  decoder = ss.Decoder(MODEL, draft)
  with pytest.raises(ss.UserError, match='make them wider'):
    run(decoder, requests_of(1))
