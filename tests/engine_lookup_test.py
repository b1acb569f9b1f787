"""Prompt lookup on the host says what prompt lookup on the device says."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import swiftspec_jax as ss
from swiftspec_jax.drafters.texts.prompt_lookup import LookupDrafter
from swiftspec_jax.step.rows import Rows


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_continuations_are_those_of_the_device(token_ids):
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
  found = LookupDrafter(drafter).continuation(np.array(token_ids), 5)
  assert found.tolist() == expected


@pytest.mark.parametrize('num_tokens', [1, 3, 7])
def test_a_continuation_goes_on_periodically(num_tokens):
  drafter = LookupDrafter(ss.PromptLookup(prompt_lookup_min=1))
  found = drafter.continuation(np.array([9, 1, 2, 1, 2]), num_tokens)
  assert found.tolist() == ([1, 2] * 4)[:num_tokens]
