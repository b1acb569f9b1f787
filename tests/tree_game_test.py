"""Rounds of drafting under any verdicts: trees and cache equal the oracle."""

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_game import Game, Sizes, random_table, tables

from swiftspec_jax import tree as tree_lib

# Room for all; too few places for nodes; too few rows; hardly any.
SIZES = [
  Sizes(48, 32, 3, 6, 2),
  Sizes(12, 12, 2, 5, 2),
  Sizes(40, 9, 4, 8, 3),
  Sizes(4, 3, 2, 4, 1),
]
# With chains: too few rows; too few places for nodes.
SIZES_OF_CHAINS = [Sizes(40, 9, 4, 8, 1), Sizes(12, 12, 2, 5, 0)]
LENGTH = 5  # of chains


def lists(values, fewest, most=None):
  return st.lists(values, min_size=fewest, max_size=most or fewest)


def games(sizes, log_probs, choice, most_choices, has_chains):
  """Strategy of sizes, a table, and the choices and chains of each round."""
  token = st.tuples(st.integers(0, 7), st.sampled_from(log_probs))
  chains = lists(lists(token, LENGTH), 2)
  round_ = st.tuples(
    lists(st.lists(choice, max_size=most_choices), 2),
    chains if has_chains else st.none(),
  )
  table = tables(log_probs)
  return st.tuples(st.sampled_from(sizes), table, lists(round_, 2, 9))


# Few values: many ties, also between parent and child.
GAMES = {
  'alone': games(
    SIZES,
    [0.0, -0.25, -0.5, -0.5, -1.0, -2.0, -np.inf],
    choice=st.integers(0, 9),
    most_choices=4,
    has_chains=False,
  ),
  'chains': games(
    SIZES_OF_CHAINS,
    [0.0, -0.25, -0.3, -0.5, -1.0, -2.0, -np.inf],
    choice=st.integers(0, 3),
    most_choices=7,
    has_chains=True,
  ),
}


@pytest.mark.parametrize('kind', GAMES)
@settings(max_examples=50)
@given(st.data())
def test_any_game_equals_heap(kind, data):
  """Roots may be candidates when chains come, and many tokens lack rows."""
  sizes, table, rounds = data.draw(GAMES[kind])
  game = Game(sizes, table, [1, 2], LENGTH + 1 if kind == 'chains' else 1)
  selections = [[], []]
  for choices, chains in rounds:
    if chains is not None:
      values = np.asarray(chains)
      chains = values[..., 0].astype(np.int32), values[..., 1].astype('f4')
    selections, _ = game.play(game.verdicts(selections, choices), chains)


@pytest.mark.parametrize(
  ('sizes', 'luck', 'has_chains'),
  [(SIZES[2], 0.6, False), (SIZES_OF_CHAINS[0], 0.7, True)],
)
def test_hundreds_of_verdicts(sizes, luck, has_chains):
  """Weights are equal by rounding only; games are long."""
  rng = np.random.default_rng(0)
  table = random_table(rng)
  seen, num_verdicts, longest, chains = set(), 0, 0, None
  while num_verdicts < 500:
    roots = rng.integers(0, 8, 2).tolist()
    game = Game(sizes, table, roots, LENGTH + 1 if has_chains else 1)
    selections = [[], []]
    for i in range(61):
      choices = rng.integers(0, 8, (2, sizes.num_nodes))
      # Mostly the most probable children, as if the draft were good.
      choices = np.minimum(choices, rng.geometric(luck, choices.shape) - 1)
      lengths = rng.integers(0, sizes.num_nodes + 1, 2)
      verdicts = game.verdicts(
        selections,
        [c[:n].tolist() for c, n in zip(choices, lengths, strict=True)],
      )
      num_verdicts += sum(map(bool, verdicts))
      if has_chains:  # of a text that is often right
        chains = (
          rng.integers(0, 8, (2, LENGTH)).astype(np.int32),
          -rng.exponential(0.3, (2, LENGTH)).astype(np.float32),
        )
      # Nothing is compiled again.
      with jax.no_tracing() if i else contextlib.nullcontext():
        selections, outcomes = game.play(verdicts, chains)
      seen |= {outcome for outcome, _ in outcomes}
      longest = max(longest, *(missing for _, missing in outcomes))
  if has_chains:
    assert longest > 1
  else:
    assert seen == {tree_lib.HIT, tree_lib.LATE_HIT, tree_lib.MISS}
