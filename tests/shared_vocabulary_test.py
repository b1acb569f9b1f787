"""Drafts with other padding, or fewer or more tokens, than their target."""

import functools

import jax
import numpy as np
import pytest
from decoding_cases import assert_same, run
from engine_cases import ALL_OR_NONE, RandomLengths, make_engine, results_of
from load_cases import read
from tree_cases import DEVICES, TREE, requests_of

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.models import decoder

# Rows of the table and tokens of the tokenizer.
TARGET = (272, 268)
DRAFTS = {
  'less padding': (270, 268, {}),
  'more padding, untied': (280, 268, {'tie_word_embeddings': False}),
  'a prefix': (264, 264, {}),
  'more tokens': (280, 274, {}),
}
TEXT = tuple((np.arange(12) * 31 + 5) % 256)
GREEDY = requests_of(2, max_new_tokens=30, ignore_eos=True)
MIXED = [*GREEDY, *requests_of(4, temperature=1.0, max_new_tokens=40)]


@pytest.fixture(scope='module')
def load(tmp_path_factory):
  """Loads a model of that many rows and tokens."""

  @functools.cache
  def directory_of(num_rows, num_tokens, tie_word_embeddings=True):
    directory = tmp_path_factory.mktemp('model')
    values = {'vocab_size': num_rows, 'num_hidden_layers': 1}
    values |= {'tie_word_embeddings': tie_word_embeddings}
    testing.write_tiny_checkpoint(directory, 'qwen3', **values)
    testing.byte_tokenizer(num_tokens).save_pretrained(directory)
    return directory

  def load(num_rows, num_tokens, changes=(), devices=(0, 1), **options):
    return ss.load(
      directory_of(num_rows, num_tokens, **dict(changes)),
      devices=jax.devices()[slice(*devices)],
      **options,
    )

  return load


unembed, widen_logits = (
  jax.jit(f, static_argnums=1) for f in (decoder.unembed, decoder.widen_logits)
)


def logits_of(model, token_ids):
  hidden, _, _ = read(model, token_ids)
  return np.asarray(unembed(model.params, model.config, hidden))


@pytest.mark.parametrize('name', DRAFTS)
def test_known_tokens_have_the_logits_of_the_draft_alone(load, name):
  num_rows, num_tokens, _ = DRAFTS[name]
  alone = load(*DRAFTS[name])
  draft = load(*DRAFTS[name], draft_of=load(*TARGET))
  num_shared = min(num_tokens, TARGET[1])
  assert draft.config.num_logits == num_shared
  logits = logits_of(draft, TEXT)
  expected = logits_of(alone, TEXT)[..., :num_shared]
  np.testing.assert_array_equal(logits, expected)
  wide = np.asarray(widen_logits(draft.params, draft.config, logits))
  assert wide.shape[2] == TARGET[0]
  np.testing.assert_array_equal(wide[..., :num_shared], logits)
  assert (wide[..., num_shared:] == -np.inf).all()
  # What the target alone knows is read as nothing.
  table = np.asarray(draft.params['embedding'])
  assert len(table) == TARGET[0]
  assert not table[num_rows:].any()


@functools.cache
def plain_of(load):
  return run(ss.Decoder(load(*TARGET), batch_size=3), MIXED)


@pytest.mark.parametrize('name', ['a prefix', 'more tokens'])
def test_chains(load, name):
  """Greedy ones are exact; drawn ones almost never disagree."""
  target = load(*TARGET)
  draft = load(*DRAFTS[name], draft_of=target)
  results = run(ss.Decoder(target, draft, batch_size=3), MIXED)
  assert_same(results[:2], plain_of(load)[:2])
  stats = [result.stats for result in results]
  num_accepted = sum(each.num_accepted for each in stats)
  # The weights are the same: a drawn token is rejected if it is unknown.
  assert num_accepted > 0.8 * sum(each.num_drafted for each in stats)
  # The target goes on after tokens that the draft does not know.
  tokens = [token for result in results for token in result.token_ids[:-1]]
  assert max(tokens) >= draft.config.num_logits


def test_trees_write_what_plain_decoding_writes(load):
  target_devices, draft_devices = DEVICES['async']
  target = load(*TARGET, devices=target_devices)
  draft = load(*DRAFTS['a prefix'], devices=draft_devices, draft_of=target)
  results = run(ss.Decoder(target, draft, tree=TREE, batch_size=3), MIXED)
  assert_same(results, plain_of(load))
  assert sum(result.stats.num_accepted for result in results) > 40


def test_engines_write_what_plain_decoding_writes(load):
  target = load(*TARGET)
  draft = load(*DRAFTS['a prefix'], draft_of=target)
  engine = make_engine(draft, RandomLengths(0), ALL_OR_NONE, target)
  results = results_of(engine, MIXED)
  assert_same(results, plain_of(load))
  assert sum(result.stats.num_accepted for result in results) > 40


def test_tables_are_split_and_quantized(load):
  options = {'draft_of': load(*TARGET), 'weight_dtype': 'int8_dynamic'}
  for name, (*_, changes) in DRAFTS.items():
    draft = load(*DRAFTS[name], devices=(0, 3), **options)
    table = draft.params['embedding']
    assert (table if changes else table.values).shape[0] == 273
    if changes:
      assert draft.params['unembedding'].values.shape[0] == 270
  draft = load(*DRAFTS[name], **options)
  logits = logits_of(draft, TEXT)
  expected = logits_of(load(*DRAFTS[name]), TEXT)[..., : TARGET[1]]
  assert 0 < np.abs(logits - expected).max() < 0.5


def test_a_saved_draft_keeps_its_vocabulary(load, tmp_path):
  target = load(*TARGET)
  draft = load(*DRAFTS['a prefix'], draft_of=target)
  ss.save(draft, tmp_path / 'saved')
  again = ss.load(tmp_path / 'saved', draft_of=target)
  assert again.config == draft.config
  np.testing.assert_array_equal(logits_of(again, TEXT), logits_of(draft, TEXT))


def test_distributions_of_other_shapes_are_refused(load):
  target, draft = load(*TARGET), load(*DRAFTS['less padding'])
  message = '270 rows of tokens and .* 272; load the draft with draft_of=target'
  for tree in (None, TREE):
    with pytest.raises(errors.UserError, match=message):
      ss.Decoder(target, draft, tree=tree)
  with pytest.raises(errors.UserError, match=message):
    make_engine(draft, target=target)
