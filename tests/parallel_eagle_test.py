"""EAGLE-3 heads that draft with masks, all tokens in one forward (P-EAGLE)."""

import functools

import eagle3_cases as cases
import numpy as np
import pytest
from checkpoint_cases import change_config
from dflash_test import LAYERS, LENGTH, REQUESTS, plain, serve
from eagle3_test import features_of, target_of
from engine_cases import make_sizes
from engine_feature_test import check_drafts
from tree_cases import CONFIG, TREE

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models.persistent_trees import PersistentTrees
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength

SWITCHES = ({}, {'norm_before_residual': True, 'fc_norm': True})


def load(directory, target, changes=(), **switches):
  switches = {**switches, 'is_parallel': True}
  weights = cases.make_weights(
    CONFIG.embed_dim, CONFIG.vocab_size, 2, **switches
  )
  switches |= {'inputs': [i + 1 for i in LAYERS]}
  switches |= {'vocab_size': CONFIG.vocab_size}
  cases.write(directory, 'speculators', weights, **switches)
  change_config(directory, **dict(changes))
  return weights, ss.load(directory, draft_of=target)


@functools.cache
def pair(directory, index=0):
  target = target_of(2)
  directory = directory / str(index)
  return target, *load(directory, target, **SWITCHES[index])


@pytest.mark.parametrize('index', [0, 1])
def test_drafts_are_those_of_the_published_forward(directory, index):
  target, weights, head = pair(directory, index)
  table = np.asarray(target.params['embedding'])

  def oracle(text, length):
    features = features_of(target, text[:-1], LAYERS)
    tokens, _ = cases.draft_at_once(
      weights, table, text, features, LENGTH, **SWITCHES[index]
    )
    return tokens[:length]

  check_drafts(target, head, oracle, (0, LENGTH))


def test_drafts_of_one_token_need_no_mask(directory):
  target, _, head = pair(directory)
  tokens, found, _ = serve(target, head, REQUESTS, FixedLength(1), (0, 1))
  assert tokens == plain()
  assert found


def test_what_cannot_be_drafted_is_refused(directory):
  target, _, head = pair(directory)
  assert ModelConfig.from_json(head.config.to_json()) == head.config
  with pytest.raises(errors.UserError, match='drafts 8; declare lengths of at'):
    serve(target, head, [], None, range(10))
  with pytest.raises(errors.UserError, match='engine alone'):
    Engine(target, PersistentTrees(model=head, tree=TREE), sizes=make_sizes())
  with pytest.raises(
    errors.UserError, match='drafts all tokens in one forward'
  ):
    ss.save_draft(head, directory / 'saved', target=target)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'mask_token_id': None}, 'mask_token_id=None .* one of the 262 tokens'),
    ({'mask_token_id': 262}, 'mask_token_id=262 .* one of the 262 tokens'),
    ({'speculators_model_type': 'eagle3'}, 'mask_hidden is not of an EAGLE-3'),
  ],
)
def test_what_is_not_understood_is_named(tmp_path, changes, message):
  with pytest.raises(errors.UserError, match=message):
    load(tmp_path, target_of(2), changes)
