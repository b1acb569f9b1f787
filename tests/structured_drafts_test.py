"""Grammars beside drafters that are models: five seeds each say the same."""

import dflash_cases
import pytest
import redrafter_cases
import tree_cases
from decoding_cases import CONFIG, assert_same, run
from engine_cases import NEAR_TARGET, READING_DRAFT, TARGET
from structured_outputs_test import KINDS, RECORD, request_of

import swiftspec_jax as ss
from swiftspec_jax.drafters.models.beam_search import BeamDraft
from swiftspec_jax.drafters.models.draft_tree import TreeDraft

WIDTH, VOCAB_SIZE = CONFIG.embed_dim, CONFIG.vocab_size
NAMES = (
  *('chain', 'chain_of_features', 'tree', 'tree_of_features'),
  *('serial', 'serial_of_features', 'beams', 'block'),
)


@pytest.fixture
def options(name, tmp_path):
  """What `Decoder` is told; two of the drafts are files first."""
  if name == 'beams':
    weights = redrafter_cases.make_weights(WIDTH, VOCAB_SIZE, head_width=64)
    head = redrafter_cases.write(
      tmp_path, weights, width=WIDTH, vocab_size=VOCAB_SIZE
    )
    return {'draft': BeamDraft(model=ss.load(head, draft_of=TARGET), width=2)}
  if name == 'block':
    weights = dflash_cases.make_weights(WIDTH, 1, None)
    dflash_cases.write(
      tmp_path, 'z-lab', weights, layers=(0,), vocab_size=VOCAB_SIZE
    )
    return {'draft': ss.load(tmp_path, draft_of=TARGET)}
  kind, _, reads_features = name.partition('_of_')
  draft = READING_DRAFT if reads_features else NEAR_TARGET
  if kind == 'tree':
    return {'draft': TreeDraft(model=draft, width=2, branching=3)}
  if kind == 'serial':
    return {'draft': draft, 'tree': tree_cases.TREE}
  return {'draft': draft}


def requests_of_seeds():
  """Five seeds and temperatures of a record, and of five other kinds."""
  return [
    request_of(kind, seed=seed, temperature=seed / 4, max_new_tokens=40)
    for seed, other in enumerate(KINDS[1:])
    for kind in (RECORD, other)
  ]


@pytest.fixture(scope='module')
def plain():
  return run(ss.Decoder(TARGET, batch_size=2), requests_of_seeds())


@pytest.mark.parametrize('name', NAMES)
def test_texts_of_grammars_do_not_depend_on_drafts(options, plain):
  decoder = ss.Decoder(TARGET, batch_size=2, **options)
  got = run(decoder, requests_of_seeds())
  assert_same(got, plain)
  assert sum(result.stats.num_accepted for result in got)
