"""Prompt lookup against a loop over the text."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import swiftspec_jax as ss
from swiftspec_jax.drafters.texts.prompt_lookup import LookupDrafter
from swiftspec_jax.step.rows import Rows

SIZE = 24


def oracle(tokens, drafter):
  """Drafts of one row, by comparing n-grams from the longest on."""
  shortest, longest = drafter.prompt_lookup_min, drafter.prompt_lookup_max
  for size in range(longest, shortest - 1, -1):
    for end in range(len(tokens) - 1, size - 1, -1):
      if tokens[end - size : end] == tokens[-size:]:
        extended = list(tokens)
        for i in range(drafter.num_speculative_tokens):
          extended.append(extended[end + i])
        return extended[len(tokens) :]
  return None


@settings(max_examples=200)
@given(
  rows=st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=SIZE),
    min_size=2,
    max_size=2,
  ),
  sizes=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
)
def test_equals_oracle(rows, sizes):
  least, most = sizes
  ngrams = {'prompt_lookup_min': least, 'prompt_lookup_max': most}
  drafter = ss.PromptLookup(num_speculative_tokens=5, **ngrams)
  # What lies after the known tokens must not matter.
  token_ids = np.full((2, SIZE), 1, np.int32)
  for row, tokens in zip(token_ids, rows, strict=True):
    row[: len(tokens)] = tokens
  drafts, counts = propose(drafter, token_ids, [len(x) for x in rows])
  for row, tokens in enumerate(rows):
    expected = oracle(tokens, drafter)
    if expected is None:
      assert counts[row] == 0
    else:
      assert counts[row] == 5
      assert drafts[row].tolist() == expected


def test_idle_rows_draft_nothing():
  """Each draft makes the step longer for all."""
  token_ids = np.full((2, SIZE), 1, np.int32)
  _, counts = propose(ss.PromptLookup(), token_ids, [8, 8], room=[0, 1])
  assert counts.tolist() == [0, 7]


def propose(drafter, token_ids, lengths, room=1):
  lengths = jnp.asarray(lengths, jnp.int32)
  rows = Rows(
    token_ids=jnp.asarray(token_ids),
    lengths=lengths,
    prompt_lengths=lengths,
    max_lengths=lengths + jnp.asarray(room, jnp.int32),
  )
  return _propose(drafter, rows)


_propose = jax.jit(ss.PromptLookup.propose, static_argnums=0)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 7))
def test_the_host_finds_the_same(tokens, num_tokens):
  drafter = ss.PromptLookup(num_speculative_tokens=num_tokens)
  found = LookupDrafter(drafter).continuation(np.array(tokens), num_tokens)
  assert found.tolist() == (oracle(tokens, drafter) or [])
