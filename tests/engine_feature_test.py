"""Drafts of an engine that read features of the target, against an oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_cases import assert_same, run
from engine_cases import (
  RandomLengths,
  assert_empty,
  make_sizes,
  results_of,
  tokens_of,
  trees_of,
)
from feature_draft_test import features_before
from load_cases import read
from tree_cases import fed_pair, requests_of

import swiftspec_jax as ss
from swiftspec_jax.drafters.models.draft_tree import TreeDraft
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.models import decoder


def narrowest_tree(model):
  return TreeDraft(model=model, width=1, branching=1, prompt_lookup=False)


unembed = jax.jit(decoder.unembed, static_argnums=1)


def best_token(draft, hidden):
  return int(np.argmax(unembed(draft.params, draft.config, hidden)))


def chain_of_oracle(target, draft, text, length):
  """Reads the text with the target's features, then its own hidden states."""
  before = features_before(target, draft, text[:-1], jnp.float32)
  known = list(text)
  for _ in range(length):
    hidden, _, _ = read(draft, known, before)
    known.append(best_token(draft, hidden[:, -1:]))
    before = np.concatenate([before, hidden[:, -1:]], axis=1)
  return known[len(text) :]


def record_drafts(engine):
  """Keeps the known text and the draft of each row of each step.

  Of trees also parents and log-probabilities.
  """
  found, draft_fn = [], engine.drafter.draft

  def draft(view, lengths, texts):
    drafts = draft_fn(view, lengths, texts)
    tokens, facts = tokens_of(drafts), []
    if drafts.trees is not None:
      trees = trees_of(drafts)
      facts = [trees.parents[:, 1:], trees.log_probs[:, 1:]]
    for row, length in enumerate(drafts.drafts.lengths.tolist()):
      if length:
        text, place = texts.known_from(view, row, 0), view.slots[row]
        draft = tokens[place, :length].tolist()
        found.append((text, draft, [fact[place, :length] for fact in facts]))
    return drafts

  engine.drafter.draft = draft
  return found


def check_drafts(target, draft, oracle, lengths=(0, 3)):
  """Drafts of an engine are an oracle's, and the text is the target's own.

  After steps without drafts, preemption and prompts that share pages. The
  oracle is a function of the text and a number of tokens. Returns outcomes.
  """
  chains = {'rows': (4,), 'lengths': lengths}
  sizes, policy = make_sizes(drafts=chains), RandomLengths(0)
  engine = Engine(target, draft, sizes=sizes, policy=policy)
  found = record_drafts(engine)
  requests = requests_of(6, max_new_tokens=60, ignore_eos=True)
  results = results_of(engine, requests)
  assert_same(results, run(ss.Decoder(target, batch_size=3), requests))
  assert engine.scheduler.num_preemptions > 0
  assert engine.scheduler.num_shared_tokens > 0
  assert_empty(engine)
  for i in np.random.default_rng(0).choice(len(found), 20, replace=False):
    text, tokens, _ = found[i]
    assert tokens == oracle(text, len(tokens))
  return policy.outcomes


@pytest.mark.parametrize('make_draft', [lambda m: m, narrowest_tree])
def test_drafts_are_those_of_the_oracle(make_draft):
  target, draft = fed_pair((0, 1), (0, 1))
  oracle = functools.partial(chain_of_oracle, target, draft)
  lengths = (0, 1, 2, 3)
  outcomes = check_drafts(target, make_draft(draft), oracle, lengths)
  assert sum(outcome.num_accepted.sum() for outcome in outcomes) > 20
