"""Prompt lookup on the host says what prompt lookup on the device says."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import swiftspec_jax as ss
from swiftspec_jax.drafters.texts.prompt_lookup import NgramIndex
from swiftspec_jax.step.rows import Rows


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 5))
def test_continuations_are_those_of_the_device(token_ids, num_pieces):
  drafter = ss.PromptLookup(num_speculative_tokens=5)
  padded = np.zeros((1, 32), np.int32)
  padded[0, : len(token_ids)] = token_ids
  rows = Rows(
    token_ids=jnp.asarray(padded),
    lengths=jnp.asarray([len(token_ids)]),
    prompt_lengths=jnp.asarray([1]),
    max_lengths=jnp.asarray([32]),
  )
  drafts, counts = drafter.propose(rows)
  expected = drafts[0, : int(counts[0])].tolist()
  index = NgramIndex(drafter.prompt_lookup_min, drafter.prompt_lookup_max)
  for piece in np.array_split(token_ids, num_pieces):
    index.extend(piece.tolist())
  assert index.continuation(5) == expected


@pytest.mark.parametrize('num_tokens', [1, 3, 7])
def test_a_continuation_goes_on_periodically(num_tokens):
  index = NgramIndex(1, 3)
  index.extend([9, 1, 2, 1, 2])
  assert index.continuation(num_tokens) == ([1, 2] * 4)[:num_tokens]
