"""Rounds of drafting under any verdicts: trees and cache equal the oracle."""

import jax
import numpy as np
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
# Few values: many ties, also between parent and child.
LOG_PROBS = [0.0, -0.25, -0.5, -0.5, -1.0, -2.0, -np.inf]


@settings(max_examples=40)
@given(
  st.sampled_from(SIZES),
  tables(LOG_PROBS),
  st.lists(
    st.lists(
      st.lists(st.integers(0, 9), min_size=0, max_size=4),
      min_size=2,
      max_size=2,
    ),
    min_size=1,
    max_size=8,
  ),
)
def test_any_game_equals_heap(sizes, table, rounds):
  game = Game(sizes, table, [1, 2])
  selections, _ = game.play([[], []])
  for choices in rounds:
    verdicts = [
      o.verdict(s, c, 8)
      for o, s, c in zip(game.oracles, selections, choices, strict=True)
    ]
    selections, _ = game.play(verdicts)


def test_hundreds_of_verdicts():
  """Weights are equal by rounding only; games are long."""
  rng, sizes = np.random.default_rng(0), SIZES[2]
  table = random_table(rng)
  seen, num_verdicts = set(), 0
  while num_verdicts < 500:
    game = Game(sizes, table, rng.integers(0, 8, 2).tolist())
    selections, _ = game.play([[], []])
    for _ in range(60):
      choices = rng.integers(0, 8, (2, sizes.num_nodes))
      # Mostly the most probable children, as if the draft were good.
      choices = np.minimum(choices, rng.geometric(0.6, choices.shape) - 1)
      lengths = rng.integers(0, sizes.num_nodes + 1, 2)
      verdicts = [
        o.verdict(s, c[:n].tolist(), 8)
        for o, s, c, n in zip(
          game.oracles, selections, choices, lengths, strict=True
        )
      ]
      num_verdicts += sum(map(bool, verdicts))
      with jax.no_tracing():  # nothing is compiled again
        selections, outcomes = game.play(verdicts)
      seen |= {outcome for outcome, _ in outcomes}
  assert seen == {tree_lib.HIT, tree_lib.LATE_HIT, tree_lib.MISS}
