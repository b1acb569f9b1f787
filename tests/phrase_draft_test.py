"""Phrases after drafts: by hand, and what the target says makes new ones."""

import engine_cases
import numpy as np
import pytest
from scheduler_test import make
from serving_cases import unpadded

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.texts import phrase_pool
from swiftspec_jax.drafters.texts.phrase_draft import PhraseDraft, PhraseDrafter
from swiftspec_jax.drafters.texts.phrase_pool import PhrasePool
from swiftspec_jax.drafters.texts.prompt_lookup import LookupDrafter
from swiftspec_jax.step.verdicts import TreePart, Verdicts

DRAFT = PhraseDraft(phrase_length=3)
# After the end of a chain; the first two share a node.
PHRASES = [(16, 17, 18), (16, 19, 20), (21, 22, 23)]
PATHS = {p[:n] for p in PHRASES for n in (1, 2, 3)}


def make_drafter_of(draft, lookup=None):
  lookup = lookup or LookupDrafter(draft.lookup)
  return PhraseDrafter(draft, lookup)


def step(drafter, text, length):
  """Drafts for a row that decodes after `text`; returns the view, too."""
  scheduler = make(buckets=unpadded(1, 9))
  scheduler.submit(0, len(text) - 1, 20)
  view = scheduler.begin_step()
  plan = scheduler.plan_step(view, np.zeros(0, np.int64))
  scheduler.commit(plan, np.zeros(1, np.int64))
  view = scheduler.begin_step()
  texts = SlotTexts(
    token_ids=np.zeros((1, 64), np.int32),
    slot_generations=scheduler.slot_generations,
    page_table=scheduler.page_table,
  )
  slot = view.slots[0]
  texts.token_ids[slot, : len(text)] = text
  drafts = drafter.draft(view, np.array([length]), texts)
  count = int(drafts.drafts.lengths[0])
  trees = engine_cases.trees_of(drafts)
  token_ids = [text[-1], *trees.token_ids[slot, 1 : count + 1].tolist()]
  parents = trees.parents[slot, : count + 1].tolist()
  probs = drafts.drafts.node_confidences()[:count, 0]
  assert (np.diff(probs) <= 0).all()
  assert all(parent < node for node, parent in enumerate(parents))
  return view, token_ids, parents


def learn(drafter, view, accepted, choices):
  choices = np.array([choices])
  none = np.zeros_like(choices)
  verdicts = Verdicts(
    num_accepted=np.array([accepted]),
    num_levels=none[:, 0],
    token_ids=none,
    tree=TreePart(path=none, is_looked_up=none > 0, choices=choices),
  )
  drafter.learn(view, np.array([choices.shape[1] - 1]), verdicts)


def paths_of(token_ids, parents):
  paths = [()]
  for token_id, parent in zip(token_ids[1:], parents[1:], strict=True):
    paths.append((*paths[parent], token_id))
  return set(paths[1:])


def test_golden_mining():
  tokens = [13, 14, 15, 30, 31, 32]
  choices = [13, 14, 15, 16, 31, 32, 33]
  found = phrase_pool.mine(tokens, range(-1, 5), choices, 3)
  assert list(found) == [(13, (14, 15, 16)), (30, (31, 32, 33))]


def test_rejected_tokens_become_phrases():
  """The lookup drafts what follows 9 in the text; the target says 40."""
  drafter = make_drafter_of(
    DRAFT, LookupDrafter(ss.PromptLookup(prompt_lookup_min=1))
  )
  view, token_ids, _ = step(drafter, [9, 13, 14, 15, 30, 9], 4)
  assert token_ids == [9, 13, 14, 15, 30]
  learn(drafter, view, 0, [40, 14, 15, 16, 31])
  assert drafter.pool.newest(13, 9) == [(14, 15, 16)]
  assert drafter.pool.newest(9, 9) == []
  # After a plain step there is nothing to learn.
  learn(drafter, view, 0, [40])


@pytest.mark.parametrize(
  ('predicted', 'emitted'), [((17, 25), (16, 17, 25)), ((17, 18), (16, 17, 18))]
)
def test_golden_lengthening(predicted, emitted):
  """A draft without a lookup; the target says 16 and goes on as predicted."""
  drafter = make_drafter_of(DRAFT)
  for phrase in reversed(PHRASES):
    drafter.pool.add(15, phrase)
  assert drafter.pool.newest(15, 2) == PHRASES[:2]
  view, token_ids, parents = step(drafter, [1, 2, 15], 9)
  assert len(token_ids) == 9  # with the root
  assert paths_of(token_ids, parents) == PATHS
  says = {15: 16, 16: predicted[0], 17: predicted[1], 18: 26}
  choices = [says.get(token_id, 0) for token_id in token_ids]
  learn(drafter, view, 2 if predicted[1] == 25 else 3, choices)
  corrected = [emitted, (16, predicted[0], 0), (16, 0, 0)]
  assert drafter.pool.newest(15, 9) == corrected


def test_fewer_nodes_are_a_tree_and_teach_what_they_can():
  drafter = make_drafter_of(DRAFT)
  for phrase in reversed(PHRASES):
    drafter.pool.add(15, phrase)
  view, token_ids, parents = step(drafter, [1, 2, 15], 2)
  assert token_ids == [15, 16, 21]
  assert parents == [-1, 0, 0]
  learn(drafter, view, 1, [16, 50, 51])
  assert drafter.pool.newest(15, 9) == PHRASES


def test_the_pool_keeps_the_newest():
  pool = PhrasePool(3, 2)
  pool.add_text([7, 1, 2, 7, 3, 4, 7, 5])
  assert pool.newest(7, 9) == [(3, 4), (1, 2)]
  pool.add(7, (5, 6))
  pool.add(7, (1, 2))
  assert pool.newest(7, 9) == [(1, 2), (5, 6), (3, 4)]
  pool.add(7, (8, 9))
  assert pool.newest(7, 2) == [(8, 9), (1, 2)]
  pool.remove(7, (8, 9))
  pool.remove(7, (8, 9))
  pool.remove(0, (8, 9))
  assert pool.newest(7, 9) == [(1, 2), (5, 6)]
  assert pool.newest(0, 9) == []


def test_outputs_are_kept_for_other_requests():
  """What a request wrote lengthens drafts of the next one, until a reset."""
  engine = engine_cases.make_engine(
    engine_cases.DRAFTS['phrases'], engine_cases.RandomLengths(share_of_none=0)
  )
  request = ss.Request(
    token_ids=(1, 2, 3),
    sampling=ss.SamplingParams(max_new_tokens=12, ignore_eos=True),
  )
  output = engine.submit(request).result().token_ids
  pool = engine.drafter.pool
  assert output[1:3] in pool.newest(output[0], 9)
  assert not engine.drafter._drafted
  engine.reset_drafters()
  assert engine.drafter.pool.newest(output[0], 9) == []


def test_bad_options_are_refused():
  for options, message in (
    ({'num_phrases': 21}, 'num_phrases must be 1 to 20'),
    ({'phrase_length': 1}, 'phrase_length must be at least 2'),
  ):
    with pytest.raises(errors.UserError, match=message):
      PhraseDraft(**options)
