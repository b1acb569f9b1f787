"""Serial and asynchronous tree decoding: exact in all settings."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from decoding_cases import assert_same, request_of, run
from engine_cases import RandomLengths
from tree_cases import (
  DEVICES,
  HYBRID,
  MIXED,
  TREE,
  fed_pair,
  pair,
  plain,
  requests_of,
)

import swiftspec_jax as ss
from swiftspec_jax import errors, testing

SMALL = dataclasses.replace(
  HYBRID,
  capacity=20,
  num_nodes=12,
  num_cache_rows=6,
  width=1,
)
FED_HYBRID = dataclasses.replace(HYBRID, width=2, num_cache_rows=4)


def draft_of(kind, mode):
  """A target, and a draft of its weights, its features or neither."""
  if 'features' not in kind:
    return pair(*DEVICES[mode], int(kind == 'bad'))
  target, draft = fed_pair(*DEVICES[mode])
  if kind == 'wrong_features':  # so that speculation stops and comes back
    wrong = {**draft.params, 'final_norm': -draft.params['final_norm']}
    draft = dataclasses.replace(draft, params=wrong)
  return target, draft


@pytest.mark.parametrize(
  ('mode', 'kind', 'run_ahead', 'tree', 'pauses'),
  [
    ('serial', 'bad', 2, TREE, False),
    ('async', 'bad', 0, TREE, False),
    ('async', 'own', 1, TREE, False),
    ('serial', 'bad', 2, TREE, True),
    ('async', 'own', 1, TREE, True),
    ('serial', 'bad', 1, HYBRID, False),
    ('async', 'bad', 1, HYBRID, False),
    ('async', 'bad', 1, SMALL, False),
    ('async', 'bad', 1, HYBRID, True),
    ('serial', 'features', 1, TREE, False),
    ('async', 'features', 2, TREE, False),
    ('async', 'features', 1, FED_HYBRID, False),
    ('serial', 'wrong_features', 1, TREE, True),
    ('async', 'wrong_features', 2, TREE, True),
  ],
)
def test_output_is_that_of_plain_decoding(mode, kind, run_ahead, tree, pauses):
  """Greedy and sampled; rows of different lengths come and go."""
  target, draft = draft_of(kind, mode)
  policy = RandomLengths(0) if pauses else None
  options = {'batch_size': 3, 'run_ahead': run_ahead, 'policy': policy}
  tree_decoder = ss.Decoder(target, draft, tree=tree, **options)
  results = run(tree_decoder, MIXED)
  assert_same(results, plain(target.config.num_layers))
  assert tree_decoder.engine.drafter.rows.is_async == (mode == 'async')
  stats = [result.stats for result in results]
  if pauses:
    assert all(0 < s.num_plain_rounds < s.num_rounds for s in stats)
  elif kind == 'features' and tree is TREE:
    assert sum(s.num_accepted for s in stats) > 20


@pytest.mark.parametrize('batch_size', [1, 3])
def test_prompts_no_longer_than_a_tree(batch_size):
  """Steps that read them are as wide as steps of drafts could be."""
  target, draft = pair(*DEVICES['serial'])
  requests = [
    request_of(range(length), max_new_tokens=8)
    for length in range(1, TREE.num_nodes + 3)
  ]
  decoder = ss.Decoder(target, draft, tree=TREE, batch_size=batch_size)
  assert_same(run(decoder, requests), run(ss.Decoder(target), requests))


FEATURES = {
  'penalty': {'repetition_penalty': 1.3, 'frequency_penalty': 0.7},
  'bias': {
    'logit_bias': {7: 4.0},
    'banned_token_ids': (3, 5),
    'logprobs': True,
    'top_logprobs': 2,
  },
  'forced': {'forced_token_ids': (1, 2, 3, 4, 5)},
}


def test_sampling_features_hold_on_trees():
  """Rows with different ones decode together."""
  requests = [
    request
    for temperature in (0.0, 1.0)
    for feature in FEATURES.values()
    for request in requests_of(
      3, temperature=temperature, max_new_tokens=25, **feature
    )
  ]
  target, draft = pair(*DEVICES['serial'])
  got = run(ss.Decoder(target, draft, tree=TREE, batch_size=3), requests)
  want = run(ss.Decoder(target, batch_size=3), requests)
  assert_same(got, want)
  biased = [bool(request.sampling.logit_bias) for request in requests]
  for one, other in itertools.compress(zip(got, want, strict=True), biased):
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-4)


def test_sliding_windows(tmp_path):
  """The windows are longer than the tree, and shorter than the text."""
  testing.write_tiny_checkpoint(tmp_path, 'gemma3_text')
  devices = jax.devices()[:1]
  target, draft = (
    ss.load(tmp_path, devices=devices, num_layers=n) for n in (2, 1)
  )
  tree = dataclasses.replace(TREE, capacity=32, num_cache_rows=14)
  requests = requests_of(2, max_new_tokens=40)
  got = run(ss.Decoder(target, draft, tree=tree), requests)
  assert_same(got, run(ss.Decoder(target), requests))
  with pytest.raises(errors.UserError, match='num_cache_rows=32 must be less'):
    ss.Decoder(target, draft, tree=TREE)


def circles():
  """A target of two circles, abcdefgh and ijklmnop, and a decoder with trees.

  The draft knows the first circle only; the letter n ends an output.
  """
  token_ids = np.arange(16)
  following = (token_ids + 1) % 8 + token_ids // 8 * 8
  table = np.full((16, 16), 0.02)
  table[token_ids, following] += 0.68
  target_devices, draft_devices = (
    jax.devices()[slice(*part)] for part in DEVICES['async']
  )
  target = testing.table_model(
    table, eos_token_ids=[13], devices=target_devices
  )
  draft = testing.table_model(
    np.eye(16)[np.where(token_ids < 8, following, 0)], devices=draft_devices
  )
  tree = dataclasses.replace(TREE, num_nodes=4)
  return target, ss.Decoder(target, draft, tree=tree, batch_size=2)


def request_after(first, **sampling):
  return request_of((first,), **{'max_new_tokens': 60, **sampling})


def test_rows_that_end_apart_are_those_of_plain_decoding():
  target, tree_decoder = circles()
  requests = [
    request_after(8),
    request_after(0, stop=('gha',)),
    request_after(8, ignore_eos=True),
    request_after(0, max_new_tokens=9),
    request_after(12),  # the first token ends it
    *(request_after(8, temperature=1.0, seed=seed) for seed in range(4)),
    request_after(8, stop=('ghi', 'pi'), ignore_eos=True),
    request_after(0, temperature=0.5, stop=('c',)),
  ]
  results = run(tree_decoder, requests)
  assert_same(results, run(ss.Decoder(target, batch_size=2), requests))
  ends = [(result.finish_reason, result.text) for result in results]
  assert ends[:5] == [
    ('stop', 'jklm'),
    ('stop', 'bcdef'),
    ('length', ('jklmnopi' * 8)[:60]),
    ('length', 'bcdefghab'),
    ('stop', ''),
  ]


def test_rows_that_ended_cause_no_restart():
  _, tree_decoder = circles()
  requests = [request_after(8), request_after(0)]
  ended, other = run(tree_decoder, requests)
  assert ended.stats.acceptance_length == 1  # so each round restarts the draft
  assert other.stats.acceptance_length > 1.9
  # What the target waited for: the first trees, and the rounds until the row's
  # end was read.
  assert other.stats.num_draft_forwards <= 2 * (ended.stats.num_rounds + 2)
  lengths = sorted(tree_decoder.engine._target.rows.lengths.tolist())
  assert lengths == [1 + 5 + 1, 61]  # with the round that was on its way


PENALTIES = {
  'repetition_penalty': 1.3,
  'presence_penalty': 0.8,
  'frequency_penalty': 0.7,
}


def test_penalties_hold_on_asynchronous_trees():
  """They count the tokens on the way to each node of a tree."""
  target, tree_decoder = circles()
  requests = [
    request_after(first, ignore_eos=True, **sampling)
    for first in (0, 8)
    for sampling in (PENALTIES, {'frequency_penalty': 2.0}, {})
  ]
  results = run(tree_decoder, requests)
  assert_same(results, run(ss.Decoder(target, batch_size=2), requests))
  outputs = [result.token_ids for result in results[:3]]
  assert len(set(outputs)) == 3  # each of them tells


@pytest.mark.parametrize('mode', DEVICES)
def test_faults_leave_the_next_request_alone(mode):
  target, draft = pair(*DEVICES[mode])
  tree_decoder = ss.Decoder(target, draft, tree=TREE, batch_size=3, run_ahead=2)
  plain_decoder = ss.Decoder(target, batch_size=3)
  usual = requests_of(1, max_new_tokens=30)
  events = tree_decoder.run(usual)
  next(events)
  events.close()  # in the middle of a round
  fills = [ss.Request(token_ids=(5,) * 250)]  # the context ends the output
  ends_at_once = [
    dataclasses.replace(usual[0], sampling=ss.SamplingParams(max_new_tokens=1))
  ]
  inside = [
    dataclasses.replace(usual[0], sampling=ss.SamplingParams(max_new_tokens=n))
    for n in (2, 3, 5)
  ]
  for requests in (usual, fills, ends_at_once, inside, usual):
    assert_same(run(tree_decoder, requests), run(plain_decoder, requests))


def test_impossible_settings_are_refused():
  target, draft = pair(*DEVICES['serial'])
  with pytest.raises(errors.UserError, match='from 1 to the capacity of 64'):
    dataclasses.replace(TREE, num_nodes=65)
  for no_model in (None, ss.SuffixLookup()):
    with pytest.raises(errors.UserError, match='tree is for draft models'):
      ss.Decoder(target, no_model, tree=TREE)
  with pytest.raises(errors.UserError, match='without a length of their own'):
    ss.Decoder(target, draft, tree=TREE, num_speculative_tokens=3)
  wide = dataclasses.replace(TREE, branching=300)
  with pytest.raises(errors.UserError, match='branching=300 is more than'):
    ss.Decoder(target, draft, tree=wide)
  overlapping = pair((0, 2), (1, 3))
  with pytest.raises(errors.UserError, match='share 1 of their devices'):
    ss.Decoder(*overlapping, tree=TREE)


def test_forced_acceptance_is_as_often_right_as_told():
  target, draft = pair(*DEVICES['serial'], 1)
  requests = requests_of(3, max_new_tokens=150)
  plain_results = run(ss.Decoder(target, batch_size=3), requests)
  tree = dataclasses.replace(
    TREE, branching=2, forced_acceptance=0.5, num_restart_steps=3
  )
  forced = [
    dataclasses.replace(request, reference_token_ids=result.token_ids)
    for request, result in zip(requests, plain_results, strict=True)
  ]
  tree_decoder = ss.Decoder(target, draft, tree=tree, batch_size=3)
  results = run(tree_decoder, forced)
  assert_same(results, plain_results)
  drafted = sum(r.stats.drafted_per_position[0] for r in results)
  accepted = sum(r.stats.accepted_per_position[0] for r in results)
  # One of the two children is right, unless the rank is two or more.
  assert abs(accepted / drafted - (1 - 0.5**2)) < 0.1
