"""Chains that a text suggests, and their scores, against loops over it."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafters.texts import text_lookup
from swiftspec_jax.tree import types

SIZE, LONGEST_MATCH = 24, 4
CONFIG = TreeConfig(num_nodes=5)
PRIOR = np.asarray(text_lookup.PRIOR)


def chain_of(tokens):
  """The longest and latest match, its length and what followed; or None."""
  found = []
  for end in range(1, len(tokens)):
    size = 0
    while (
      size < min(end, LONGEST_MATCH)
      and tokens[end - 1 - size] == tokens[len(tokens) - 1 - size]
    ):
      size += 1
    extended = list(tokens)
    for i in range(CONFIG.num_nodes):
      extended.append(extended[end + i])
    if size:
      found.append((size, end, extended[len(tokens) :]))
  if not found:
    return 0, []
  size, _, chain = max(found)
  return size, chain


def bucket(size, i):
  """The index of the rate of token i of a chain after a match."""
  return min(size + i, len(PRIOR)) - 1


def count(size, chain, verified, tried, right):
  """Walks down the chain as far as it is right."""
  for i, (suggested, wanted) in enumerate(zip(chain, verified, strict=False)):
    tried[bucket(size, i)] += 1
    if suggested != wanted:
      break
    right[bucket(size, i)] += 1


def start(rows):
  made = [text_lookup.make_row(CONFIG, row, SIZE) for row in rows]
  return jax.tree.map(lambda *x: jnp.concatenate(x), *made)


follow = jax.jit(text_lookup.follow)
look_up = jax.jit(text_lookup.look_up)
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
# Longer than chains are those of several rounds that a draft missed.
LONGEST = CONFIG.num_nodes + 3
VERDICT = st.lists(st.integers(0, 2), min_size=0, max_size=LONGEST)


@settings(max_examples=100)
@given(
  st.lists(TEXT, min_size=2, max_size=2),
  st.lists(st.lists(VERDICT, min_size=2, max_size=2), min_size=1, max_size=4),
)
def test_equals_oracle(rows, rounds):
  rows = [list(row) for row in rows]
  lookup, _ = look_up(start(rows))
  tried = np.full((2, len(PRIOR)), 8.0)
  right = tried * PRIOR
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
      count(*chain_of(rows[row]), verdict, tried[row], right[row])
      rows[row] += verdict
      check(lookup, log_probs, row, rows[row], right[row] / tried[row])
  np.testing.assert_allclose(lookup.num_tried, tried)
  np.testing.assert_allclose(lookup.num_right, right, rtol=1e-5)


def check(lookup, log_probs, row, tokens, rates):
  assert lookup.lengths[row] == len(tokens)
  assert lookup.token_ids[row, : len(tokens)].tolist() == tokens
  size, chain = chain_of(tokens)
  assert lookup.match_lengths[row] == size
  if not size:
    assert (log_probs[row] == -np.inf).all()
    return
  assert lookup.chains[row].tolist() == chain
  wanted = np.log([rates[bucket(size, i)] for i in range(len(chain))])
  np.testing.assert_allclose(log_probs[row], wanted, rtol=1e-4)


def test_nothing_is_kept_without_a_switch():
  without = TreeConfig(prompt_lookup=False)
  assert text_lookup.make_row(without, [1, 2, 3], SIZE) is None


def test_what_the_target_does_not_write_ends_matches_and_chains():
  control = 9
  rows = [[control, 1, 2, control, 1], [5, 1, control, 5, 1]]
  made = [
    text_lookup.make_row(TreeConfig(num_nodes=3), row, SIZE, [control])
    for row in rows
  ]
  lookup = jax.tree.map(lambda *x: jnp.concatenate(x), *made)
  lookup, log_probs = look_up(lookup)
  assert lookup.match_lengths.tolist() == [1, 2]
  np.testing.assert_allclose(np.exp(log_probs[0]), [PRIOR[0], 0, 0], rtol=1e-5)
  assert (log_probs[1] == -np.inf).all()
  verified = types.VerifiedTokens(
    token_ids=jnp.asarray([[2, 7, -1], [3, 7, -1]], jnp.int32),
    num_tokens=jnp.full(2, 2),
  )
  counted = follow(lookup, verified)
  # One token was suggested, which came true.
  tried = counted.num_tried - lookup.num_tried
  assert tried.sum(axis=1).tolist() == [1, 0]
