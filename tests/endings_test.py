"""What ends an output, and what of it is text: as vLLM has it."""

import dataclasses
import functools

import numpy as np
import pytest
from decoding_cases import request_of, run
from decoding_test import DRAWS, assert_follows_distribution, markov_table

import swiftspec_jax as ss
from swiftspec_jax import testing

A, D, G, H = 0, 3, 6, 7


def circle():
  """Letters that mostly follow each other; h ends a text, and is special."""
  table = np.full((8, 8), 0.05) + 0.6 * np.roll(np.eye(8), 1, axis=1)
  model = testing.table_model(table, eos_token_ids=[H])
  model.tokenizer.add_special_tokens({'eos_token': 'h', 'pad_token': 'g'})
  return model


MODEL = circle()
PLAIN = ss.Decoder(MODEL, batch_size=4)
after_a = functools.partial(request_of, (A,), max_new_tokens=20)


STOPS_SHOWN = {'include_stop_str_in_output': True}
SPECIAL_SHOWN = {'skip_special_tokens': False}
HH_FORCED = {'forced_token_ids': (H, H)}


@pytest.mark.parametrize(
  ('sampling', 'text', 'tokens', 'reason'),
  [
    ({}, 'bcdef', 'bcdefgh', None),
    (SPECIAL_SHOWN, 'bcdefg', 'bcdefgh', None),
    (STOPS_SHOWN, 'bcdef', 'bcdefgh', None),
    ({**STOPS_SHOWN, **SPECIAL_SHOWN}, 'bcdefgh', 'bcdefgh', None),
    ({'stop_token_ids': (D, 4)}, 'bc', 'bcd', D),
    ({'stop_token_ids': (D,), **STOPS_SHOWN}, 'bcd', 'bcd', D),
    ({'stop_token_ids': (H,)}, 'bcdef', 'bcdefgh', None),
    ({'stop_token_ids': (H,), 'ignore_eos': True}, 'bcdef', 'bcdefgh', H),
    ({'stop': ('de',)}, 'bc', 'bcde', 'de'),
    ({'stop': ('de',), **STOPS_SHOWN}, 'bcde', 'bcde', 'de'),
    ({'stop': ('d',), 'stop_token_ids': (D,)}, 'bc', 'bcd', D),
    # Special tokens stop, though the text does not show them.
    ({'stop': ('g',)}, 'bcdef', 'bcdefg', 'g'),
    ({'stop': ('fg',)}, 'bcde', 'bcdefg', 'fg'),
    ({'stop': ('gha',), 'ignore_eos': True}, 'bcdef', 'bcdefgha', 'gha'),
    ({'stop': ('fa',), 'ignore_eos': True}, 'bcde', 'bcdefgha', 'fa'),
    ({'stop': ('g',), **STOPS_SHOWN}, 'bcdef', 'bcdefg', 'g'),
    ({'stop': ('h', 'x'), 'ignore_eos': True}, 'bcdef', 'bcdefgh', 'h'),
    # The first tokens end nothing: the next best one is a.
    ({'min_tokens': 6}, 'bcdef', 'bcdefgh', None),
    ({'min_tokens': 7}, 'bcdefabcdef', 'bcdefgabcdefgh', None),
    ({'min_tokens': 5, 'stop_token_ids': (D,)}, 'bcabc', 'bcabcd', D),
    ({'min_tokens': 4, 'stop': ('cd', 'ef')}, 'bcd', 'bcdef', 'ef'),
    ({'min_tokens': 3, 'stop': ('cde',)}, 'b', 'bcde', 'cde'),
    ({'min_tokens': 4, 'stop': ('cde',)}, 'bcdef', 'bcdefgh', None),
    ({**HH_FORCED, 'min_tokens': 2}, 'abcdef', 'hhabcdefgh', None),
  ],
)
def test_ends_and_texts(sampling, text, tokens, reason):
  (result,) = run(PLAIN, [after_a(**sampling)])
  letters = ''.join('abcdefgh'[i] for i in result.token_ids)
  assert (result.text, letters, result.stop_reason) == (text, tokens, reason)
  assert result.finish_reason == 'stop'


def test_no_end_is_the_token_limit():
  limits = {'ignore_eos': True, 'min_tokens': 7, 'max_new_tokens': 16}
  (result,) = run(PLAIN, [after_a(**limits)])
  assert (result.text, result.finish_reason) == ('bcdefabcdefab', 'length')
  assert result.token_ids[6] == A  # h is banned first, as in vLLM
  assert result.stop_reason is None


# Each of them proposes some tokens that are banned, or that are wrong.
OTHER = testing.table_model(markov_table(8, seed=3), name='other')
DRAFTS = {
  'lookup': {'draft': ss.PromptLookup(prompt_lookup_min=1)},
  'chain': {'draft': OTHER},
  'tree': {
    'draft': MODEL,
    'tree': ss.TreeConfig(num_nodes=4, width=2, num_draft_steps=2, branching=2),
  },
  'pages': {'draft': ss.TreeDraft(model=MODEL, num_draft_steps=2)},
}


@pytest.mark.parametrize('name', DRAFTS)
def test_min_tokens_hold_wherever_tokens_are_drafted(name):
  # A chain of a model is verified by other noise.
  temperatures = [0.0] if name == 'chain' else [0.0, 1.0, 1.0]
  requests = [
    after_a(
      temperature=temperature,
      seed=seed,
      min_tokens=min_tokens,
      stop_token_ids=stop_token_ids,
    )
    for seed, temperature in enumerate(temperatures)
    for min_tokens in (0, 3, 10)
    for stop_token_ids in ((), (1, D))
  ]
  results = run(ss.Decoder(MODEL, batch_size=4, **DRAFTS[name]), requests)
  expected = run(PLAIN, requests)
  for request, got, want in zip(requests, results, expected, strict=True):
    assert got.token_ids == want.token_ids
    assert got.stop_reason == want.stop_reason
    ends = {H, *request.sampling.stop_token_ids}
    *others, last = got.token_ids
    assert not ends.intersection(others)
    assert len(others) >= request.sampling.min_tokens
    assert (last in ends) == (got.finish_reason == 'stop')
  assert sum(result.stats.num_accepted for result in results)


def test_sampled_sequences_follow_the_law_without_ends():
  """Chi-square over DRAWS of which c may be but the third token."""
  table = markov_table(3, seed=0)
  requests = [
    dataclasses.replace(
      request,
      sampling=dataclasses.replace(
        request.sampling, min_tokens=2, stop_token_ids=(2,)
      ),
    )
    for request in DRAWS[:400]
  ]
  draft = testing.table_model(markov_table(3, seed=5))
  decoder = ss.Decoder(testing.table_model(table), draft, batch_size=64)
  early = table * [1, 1, 0]
  early /= early.sum(axis=1, keepdims=True)
  # 11 degrees of freedom; chance exceeds 43 once in 10^5.
  assert_follows_distribution(run(decoder, requests), table, early, most=43)
