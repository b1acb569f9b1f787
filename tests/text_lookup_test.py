"""Chains that a text suggests, and their scores, against loops over it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafters.texts import text_lookup
from swiftspec_jax.tree import types

SIZE = 24
PLAIN = TreeConfig(prompt_lookup=False)
BOTH = TreeConfig(num_nodes=5, suffix_lookup=True)
KINDS = text_lookup.kinds_of(BOTH)
NUM_LENGTHS = len(KINDS[0].prior)


def chains_of(tokens, kind):
  """Pairs of match length and chain, the longest and latest match first."""
  found = []
  for end in range(1, len(tokens)):
    size = 0
    while (
      size < min(end, kind.longest)
      and tokens[end - 1 - size] == tokens[len(tokens) - 1 - size]
    ):
      size += 1
    if size:
      extended = list(tokens)
      for i in range(BOTH.num_nodes):
        extended.append(extended[end + i])
      found.append((size, end, tuple(extended[len(tokens) :])))
  found.sort(reverse=True)
  return [(size, chain) for size, _, chain in found[: kind.num_chains]]


def bucket(chains, prefix):
  """The length of the match after a prefix of chains."""
  sizes = [s for s, chain in chains if chain[: len(prefix)] == prefix]
  return min(max(sizes) + len(prefix), NUM_LENGTHS) - 1


def count(chains, verified, tried, right):
  """Walks down the chains as far as they are right."""
  for i in range(len(verified)):
    prefix = tuple(verified[:i])
    if not any(chain[:i] == prefix for _, chain in chains):
      break
    place = bucket(chains, prefix)
    tried[place] += 1
    wanted = (*prefix, verified[i])
    right[place] += any(chain[: i + 1] == wanted for _, chain in chains)


def log_probs_of(chains, rates):
  """A list for each chain."""
  found = []
  for _, chain in chains:
    values = []
    for i in range(len(chain)):
      rivals = [c for _, c in chains if c[:i] == chain[:i]]
      alike = [c for c in rivals if c[: i + 1] == chain[: i + 1]]
      rate = rates[bucket(chains, chain[:i])]
      values.append(np.log(rate * len(alike) / len(rivals)))
    found.append(values)
  return found


def start(rows):
  made = [text_lookup.make_row(BOTH, row, SIZE) for row in rows]
  return jax.tree.map(lambda *x: jnp.concatenate(x), *made)


follow = jax.jit(text_lookup.follow)
look_up = jax.jit(text_lookup.look_up)
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
# Longer than chains are those of several rounds that a draft missed.
LONGEST = BOTH.num_nodes + 3
VERDICT = st.lists(st.integers(0, 2), min_size=0, max_size=LONGEST)


@settings(max_examples=100)
@given(
  st.lists(TEXT, min_size=2, max_size=2),
  st.lists(st.lists(VERDICT, min_size=2, max_size=2), min_size=1, max_size=4),
)
def test_equals_oracle(rows, rounds):
  rows = [list(row) for row in rows]
  lookup, _ = look_up(start(rows))
  tried = np.full((2, 2, NUM_LENGTHS), 8.0)
  right = tried * np.asarray([kind.prior for kind in KINDS])
  for verdicts in rounds:
    verdicts = [
      v[: SIZE - len(row)] for v, row in zip(verdicts, rows, strict=True)
    ]
    padded = [v + [-1] * (LONGEST - len(v)) for v in verdicts]
    verified = types.VerifiedTokens(
      token_ids=jnp.asarray(padded, jnp.int32),
      num_tokens=jnp.asarray([len(v) for v in verdicts], jnp.int32),
    )
    lookup, log_probs = look_up(follow(lookup, verified))
    for row, verdict in enumerate(verdicts):
      for i, kind in enumerate(KINDS):
        chains = chains_of(rows[row], kind)
        told = verdict[: BOTH.num_nodes]
        count(chains, told, tried[row, i], right[row, i])
      rows[row] += verdict
      check(lookup, log_probs, row, rows[row], right[row] / tried[row])
  np.testing.assert_allclose(lookup.num_tried, tried)
  np.testing.assert_allclose(lookup.num_right, right, rtol=1e-5)


def check(lookup, log_probs, row, tokens, rates):
  assert lookup.lengths[row] == len(tokens)
  assert lookup.token_ids[row, : len(tokens)].tolist() == tokens
  place = 0
  for i, kind in enumerate(KINDS):
    chains = chains_of(tokens, kind)
    values = log_probs_of(chains, rates[i])
    for j in range(kind.num_chains):
      if j < len(chains):
        size, chain = chains[j]
        assert lookup.match_lengths[row, place] == size
        assert tuple(lookup.chains[row, place].tolist()) == chain
        np.testing.assert_allclose(log_probs[row, place], values[j], rtol=1e-4)
      else:
        assert lookup.match_lengths[row, place] == 0
        assert (log_probs[row, place] == -np.inf).all()
      place += 1


def test_nothing_is_kept_without_a_switch():
  assert text_lookup.make_row(PLAIN, [1, 2, 3], SIZE) is None


def test_each_switch_has_its_chains():
  row = functools.partial(text_lookup.make_row, token_ids=[1], capacity=SIZE)
  prompt = row(TreeConfig())
  suffix = row(dataclasses.replace(PLAIN, suffix_lookup=True))
  assert prompt.chains.shape == (1, 1, 8)
  assert suffix.chains.shape == (1, 4, 8)
  assert row(BOTH).chains.shape == (1, 5, 5)


def test_what_the_target_does_not_write_ends_matches_and_chains():
  control = 9
  rows = [[control, 1, 2, control, 1], [5, 1, control, 5, 1]]
  made = [
    text_lookup.make_row(TreeConfig(num_nodes=3), row, SIZE, [control])
    for row in rows
  ]
  lookup = jax.tree.map(lambda *x: jnp.concatenate(x), *made)
  lookup, log_probs = look_up(lookup)
  assert lookup.match_lengths.tolist() == [[1], [2]]
  prior = text_lookup.PROMPT_LOOKUP.prior[0]
  np.testing.assert_allclose(np.exp(log_probs[0, 0]), [prior, 0, 0], rtol=1e-5)
  assert (log_probs[1] == -np.inf).all()
  verified = types.VerifiedTokens(
    token_ids=jnp.asarray([[2, 7, -1], [3, 7, -1]], jnp.int32),
    num_tokens=jnp.full(2, 2),
  )
  counted = follow(lookup, verified)
  # One token was suggested, which came true.
  assert (counted.num_tried - lookup.num_tried).sum(axis=(1, 2)).tolist() == [
    1,
    0,
  ]
