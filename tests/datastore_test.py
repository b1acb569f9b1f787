"""Drafts out of texts: by hand, and against searches in plain Python."""

import itertools
import json

import engine_cases
import numpy as np
import programs
import pytest
import serving_cases as cases
from decoding_cases import request_of
from hypothesis import given, settings
from hypothesis import strategies as st

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.texts import continuations
from swiftspec_jax.drafters.texts import token_store as token_store_lib
from swiftspec_jax.drafters.texts.datastore import Datastore, DatastoreDrafter
from swiftspec_jax.drafters.texts.past_texts import PastTexts
from swiftspec_jax.drafters.texts.token_store import TokenStore
from swiftspec_jax.policies.fixed_length import FixedLength

TOKENIZER = engine_cases.TARGET.tokenizer
OWN = np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 6, 1, 2, 3])
TEXTS = [[1, 2, 3, 4, 7], [1, 2, 3, 4, 8], [9, 2, 3, 5, 5]]
STORE = TokenStore.of_texts(TEXTS, TOKENIZER)
GOLDEN = {
  (4,): 0.75,
  (4, 7): 0.375,
  (4, 8): 0.375,
  (5,): 0.25,
  (5, 5): 0.25,
  (4, 1): 0.18,
  (4, 6): 0.18,
  (5, 1): 0.18,
  (4, 1, 2): 0.162,
}


def make_drafter(**options):
  options = {'max_match': 3, 'max_depth': 3, 'min_prob': 0, **options}
  return DatastoreDrafter(Datastore(**options))


def paths(tree):
  found = []
  for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
    found.append((*(found[parent] if parent >= 0 else ()), token_id))
  return found


@pytest.mark.parametrize('num_nodes', [1, 5, 9])
def test_golden_merge(num_nodes):
  tree = make_drafter(store=STORE).tree(OWN, num_nodes)
  found = dict(zip(paths(tree), tree.probs, strict=True))
  assert list(found) == list(GOLDEN)[:num_nodes]
  assert found == pytest.approx(dict(list(GOLDEN.items())[:num_nodes]))
  assert tree.parents == [-1, 0, 0, -1, 3, 0, 0, 3, 5][:num_nodes]


def test_own_text_alone():
  """4 twice and 5 once after 1 2 3, at six tenths."""
  tree = make_drafter().tree(OWN, 4)
  assert paths(tree) == [(4,), (5,), (4, 1), (4, 6)]
  np.testing.assert_allclose(tree.probs, [0.4, 0.2, 0.18, 0.18])
  assert make_drafter(min_prob=0.19).tree(OWN, 9).token_ids == [4, 5]
  assert make_drafter().tree(OWN[:1], 9).token_ids == []


def random_texts(seed, num_tokens=3):
  generator = np.random.default_rng(seed)
  return [
    generator.integers(0, num_tokens, generator.integers(1, 60)).tolist()
    for _ in range(6)
  ]


@pytest.mark.parametrize('seed', range(4))
def test_places_and_continuations_are_those_of_a_scan(seed):
  """Few different tokens, so that long matches are frequent."""
  texts = random_texts(seed, num_tokens=1 + seed)
  store = TokenStore.of_texts(texts, TOKENIZER)
  for size in (1, 2, 5, token_store_lib.MAX_MATCH):
    for match in (texts[0][:size], texts[-1][-size:], [0] * size, [2] * size):
      known = [
        text[place + len(match) :][:4]
        for text in texts
        for place in range(len(text) - len(match) + 1)
        if text[place : place + len(match)] == match
      ]
      assert len(store.places(match)) == len(known)
      found = list(store.continuations(match, 4, most=1000))
      assert sorted(found) == sorted(filter(None, known))
      fewer = list(store.continuations(match, 4, most=3))
      assert len(fewer) <= 3
      assert all(part in found for part in fewer)


@pytest.mark.parametrize('seed', range(3))
def test_merge_is_that_of_all_paths(seed):
  """The best of each path, sorted; parents come before their children."""
  text = np.concatenate(random_texts(seed))
  store = TokenStore.of_texts(random_texts(seed + 9), TOKENIZER)
  drafter = make_drafter(store=store)
  sources = [*continuations.of_own_text(text, 3, 100), drafter._of_others(text)]
  best = {}

  def walk(counts, prob, path, factor):
    for token_id, child in counts.children.items():
      below = (*path, token_id)
      share = round(prob * child.count / counts.count, 12)
      best[below] = max(best.get(below, 0), share)
      walk(child, share * factor, below, factor)

  for source in sources:
    walk(source.counts, source.weight, (), source.factor)
  expected = sorted(best.items(), key=lambda x: (-x[1], len(x[0]), x[0]))
  tree = drafter.tree(text, 20)
  assert paths(tree) == [path for path, _ in expected[:20]]
  np.testing.assert_allclose(tree.probs, [p for _, p in expected[:20]])
  assert all(parent < i for i, parent in enumerate(tree.parents))


def test_drafts_of_rows():
  """Rows of lengths 0, 2 and 9; what is nobody's stays empty."""
  view = cases.make_view(
    3, cases.unpadded(3, max_length=9), kv_lengths=len(OWN) - 1
  )
  texts = SlotTexts(
    token_ids=np.tile(np.pad(OWN, (0, 4)), (4, 1)),
    slot_generations=np.zeros(4, int),
    page_table=np.zeros((4, 1), int),
  )
  drafts = make_drafter(store=STORE).draft(view, np.array([0, 2, 9]), texts)
  assert drafts.drafts.lengths.tolist() == [0, 2, 9]
  confidences = drafts.drafts.node_confidences()
  np.testing.assert_allclose(confidences[:, 2], list(GOLDEN.values()))
  assert (confidences[2:, 1] == 0).all()
  trees = engine_cases.trees_of(drafts)
  parents = trees.parents
  assert parents[1].tolist() == [-1, 0, 1, *[-1] * 7]
  assert parents[2].tolist() == [-1, 0, 1, 1, 0, 4, 1, 1, 4, 6]
  assert trees.depths[2].tolist() == [0, 1, 2, 2, 1, 2, 2, 2, 2, 3]
  assert (parents[[0, 3]] == tree_lib.NO_PARENT).all()


def test_files_are_the_store(tmp_path):
  STORE.save(tmp_path / 'store')
  opened = TokenStore.open(tmp_path / 'store')
  assert isinstance(opened.tokens, np.memmap)
  assert opened.tokens.dtype == np.uint16
  for name in ('tokens', 'suffixes'):
    np.testing.assert_array_equal(getattr(opened, name), getattr(STORE, name))
  assert paths(make_drafter(store=opened).tree(OWN, 9)) == list(GOLDEN)
  opened.check('target', TOKENIZER)


def test_bad_stores_are_refused(tmp_path):
  for texts, message in (
    ([[]], 'no text to store'),
    ([[1, -1]], 'token -1; ids are 0 to'),
    ([[len(TOKENIZER)]], 'ids are 0 to'),
  ):
    with pytest.raises(errors.UserError, match=message):
      TokenStore.of_texts(texts, TOKENIZER)
  with pytest.raises(errors.UserError, match='no whole store'):
    TokenStore.open(tmp_path)
  STORE.save(tmp_path)
  path = tmp_path / 'suffixes.npy'
  path.write_bytes(path.read_bytes()[:-4])
  with pytest.raises(errors.UserError, match='no whole store'):
    TokenStore.open(tmp_path)
  other = TokenStore(
    tokens=STORE.tokens, suffixes=STORE.suffixes, vocabulary={'size': 5}
  )
  with pytest.raises(errors.UserError, match='another vocabulary than that of'):
    engine_cases.make_engine(Datastore(store=other))
  with pytest.raises(errors.UserError, match='max_match must be 1 to 32'):
    Datastore(max_match=33)


def test_texts_end_at_eos():
  parts = token_store_lib.split([1, 2, 0, 0, 3], [0])
  assert list(parts) == [[1, 2, 0], [0], [3]]


def test_programs(model, tmp_path):
  """Text files become a store that a program takes."""
  for i in range(2):
    (tmp_path / f'{i}.txt').write_text(f'The sea is deep and blue, {i} times.')
  target = f'--target={model}'
  store = tmp_path / 'store'
  flags = target, f'--output_dir={store}'
  assert 'give --texts or --shards' in programs.error_of('build_store', *flags)
  output = programs.output_of(
    'build_store', *flags, f'--texts={tmp_path}/*.txt'
  )
  assert '2 texts' in output
  assert json.loads((store / 'store.json').read_text())['vocabulary']['size']
  assert (TokenStore.open(store).tokens == 0).sum() == 2
  (expected,) = ss.generate(ss.load(model), 'The sea is', max_new_tokens=24)
  output = programs.output_of(
    'generate',
    target,
    '--mode=datastore',
    f'--datastore={store}',
    '--max_new_tokens=24',
    '--prompt=The sea is',
  )
  assert output == f'{expected.text}\n'


def test_counts_of_own_text_are_those_of_a_scan():
  for seed in range(3):
    text = list(itertools.chain(*random_texts(seed)))
    sources = list(continuations.of_own_text(np.array(text), 2, 1000))
    for size, source in zip((3, 2, 1), sources, strict=True):
      end = text[-size:]
      places = [
        place
        for place in range(size, len(text))
        if text[place - size : place] == end
      ]
      assert source.counts.count == len(places)
      followers = [text[place] for place in places]
      for token_id, child in source.counts.children.items():
        assert child.count == followers.count(token_id)


@settings(max_examples=60)
@given(
  st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=4),
  st.lists(st.integers(0, 2), min_size=1, max_size=3),
)
def test_past_continuations_are_those_of_a_scan(texts, match):
  past = PastTexts(1000)
  for text in texts:
    past.add(np.array(text, np.int32))
  expected = [
    text[place : place + 4]
    for text in texts
    for place in range(len(match), len(text))
    if text[place - len(match) : place] == match
  ]
  assert list(past.continuations(match, 4, 1000)) == expected
  assert list(past.continuations(match, 4, 2)) == expected[-2:]


def test_the_oldest_texts_go():
  past = PastTexts(5)
  for text in ([1, 2, 3], [1, 4], [1, 5]):
    past.add(np.array(text, np.int32))
  assert list(past.continuations([1], 4, 9)) == [[4], [5]]
  past.add(np.zeros(6, np.int32))
  assert list(past.continuations([0], 4, 9)) == []


def test_a_learning_server_drafts_what_others_wrote():
  """The second request is as the first one, and nothing else is known."""
  request = request_of((5, 6, 7), max_new_tokens=30, ignore_eos=True)
  draft = Datastore(num_past_tokens=100, min_prob=0)
  engine = engine_cases.make_engine(draft, FixedLength(6))
  first, second = (engine.submit(request).result() for _ in range(2))
  assert first.token_ids == second.token_ids
  assert second.stats.num_rounds < first.stats.num_rounds
  # From 3 tokens of the prompt on.
  (text,) = engine.drafter.past.continuations([5, 6, 7], 9, 1)
  assert tuple(text) == first.token_ids[:9]
  engine.reset_drafters()
  assert not list(engine.drafter.past.continuations([5, 6, 7], 9, 1))
