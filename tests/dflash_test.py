"""DFlash drafts: loaded, compared with an oracle, exact in engines."""

import functools
import json

import dflash_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_test import features_of, target_of
from engine_cases import RandomLengths, assert_empty, make_sizes
from engine_feature_test import record_drafts
from tree_cases import CONFIG, TREE, requests_of

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import decoder
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.serving.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.serving.engine import PageEngine

VOCAB_SIZE, WIDTH = CONFIG.vocab_size, CONFIG.embed_dim
LAYERS = (0, 1)
LENGTH = cases.BLOCK - 1
SLIDING = {
  'use_sliding_window': True,
  'sliding_window': 8,
  'layer_types': ['sliding_attention'] * 2,
}
KINDS = {
  'z-lab': ({'layout': 'z-lab'}, {}),
  'speculators': ({'layout': 'speculators'}, {}),
  'reduced': ({'layout': 'speculators', 'is_reduced': True}, {}),
  'sliding': (
    {'layout': 'z-lab', 'sizes': SLIDING},
    {'window': 8, 'causal': True},
  ),
  'non_causal': (
    {
      'layout': 'speculators',
      'sizes': SLIDING,
      'sliding_window_non_causal': True,
    },
    {'window': 8},
  ),
}


def draft_of(directory, target, layout='z-lab', is_reduced=False, **options):
  """A draft of that layout, and its weights."""
  weights = cases.make_weights(WIDTH, 2, VOCAB_SIZE if is_reduced else None)
  options = {'layers': LAYERS, 'vocab_size': VOCAB_SIZE, **options}
  cases.write(directory, layout, weights, **options)
  return weights, ss.load(directory, draft_of=target)


@functools.cache
def pair(directory, kind='z-lab'):
  target = target_of(2)
  return target, *draft_of(directory / kind, target, **KINDS[kind][0])


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  return tmp_path_factory.mktemp('drafts')


def oracle_of(target, weights, text, **options):
  table = np.asarray(target.params['embedding'])
  features = features_of(target, text[:-1], LAYERS)
  return cases.draft(weights, table, table, text, features, **options)


def serve(target, draft, requests, policy, lengths=range(LENGTH + 1), **sizes):
  drafts = {'rows': (4,), 'lengths': tuple(lengths), **sizes}
  sizes = make_sizes(drafts=drafts)
  engine = PageEngine(target, draft, sizes=sizes, policy=policy)
  found = record_drafts(engine)
  handles = [engine.submit(request) for request in requests]
  results = [handle.result() for handle in handles]
  assert_empty(engine)
  return [result.token_ids for result in results], found, results


REQUESTS = requests_of(6, max_new_tokens=40, ignore_eos=True)


@functools.cache
def plain():
  return serve(target_of(2), None, REQUESTS, None)[0]


@pytest.mark.parametrize('kind', KINDS)
def test_drafts_are_those_of_the_published_forward(directory, kind):
  """Of an engine with preemption and steps without drafts; greedy."""
  target, weights, draft = pair(directory, kind)
  tokens, found, _ = serve(target, draft, REQUESTS, RandomLengths(0))
  assert tokens == plain()
  generator = np.random.default_rng(0)
  for i in generator.choice(len(found), 15, replace=False):
    text, drafted = found[i]
    expected, _ = oracle_of(target, weights, text, **KINDS[kind][1])
    assert drafted == expected[: len(drafted)]
