"""Rounds of drafting under any verdicts: trees and cache equal the oracle."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec_jax import tree as tree_lib
from swiftspec_jax import types
from swiftspec_jax.cache import dense


class Sizes(NamedTuple):
  capacity: int
  num_cache_rows: int
  width: int
  num_nodes: int
  num_steps: int


class Game:
  """A batch of trees and caches next to their oracles."""

  def __init__(self, sizes, table, roots):
    self.sizes, self.table = sizes, table
    self.num_rounds = 0
    self.tree = tree_lib.new_tree(
      jnp.asarray(roots, jnp.int32),
      capacity=sizes.capacity,
      num_cache_rows=sizes.num_cache_rows,
    )
    rows = jnp.zeros((len(roots), 1, 640, 1), jnp.int32)
    self.cache = dense.KVCache(
      keys=[rows],
      values=[rows],
      kv_lengths=jnp.zeros(len(roots), jnp.int32),
      capacity=640,
    )
    self.oracles = [
      tree_oracle.HeapTree(root, sizes.capacity, sizes.num_cache_rows, table)
      for root in roots
    ]

  def play(self, verdicts):
    """Plays a round; returns the selections and outcomes of the oracles."""
    sizes = self.sizes
    num_tokens = [len(verdict) for verdict in verdicts]
    padded = [v + [-1] * (sizes.num_nodes - len(v)) for v in verdicts]
    self.tree, self.cache, moved, sent = jax.device_get(
      tree_oracle.play_round(
        self.tree,
        self.cache,
        self.table,
        np.asarray(padded, np.int32),
        np.asarray(num_tokens, np.int32),
        num_nodes=sizes.num_nodes,
        num_steps=sizes.num_steps,
        width=sizes.width,
      )
    )
    outcomes = [
      self._check_reroot(moved, row, verdict)
      for row, verdict in enumerate(verdicts)
    ]
    while any(
      o.can_grow and len(o.nodes) < sizes.num_nodes for o in self.oracles
    ):
      for oracle in self.oracles:
        oracle.expand(sizes.width)
    selections = [o.select(sizes.num_nodes) for o in self.oracles]
    for row, selection in enumerate(selections):
      self._check_selection(sent, row, selection)
    for oracle in self.oracles:
      for _ in range(sizes.num_steps):
        oracle.expand(sizes.width)
    for row, oracle in enumerate(self.oracles):
      self._check_tree(row, oracle)
    return selections, outcomes

  def _check_reroot(self, moved, row, verdict):
    oracle = self.oracles[row]
    outcome, committed, surviving = oracle.reroot(verdict)
    assert moved.outcome[row] == outcome
    assert moved.num_committed[row] == len(committed)
    assert moved.num_surviving[row] == len(surviving)
    path = committed + surviving
    assert moved.path[row, : len(path)].tolist() == path
    assert not moved.path[row, len(path) :].any()
    num_missing = len(verdict) - len(committed)
    assert 0 <= num_missing <= (outcome == tree_lib.MISS)
    return outcome, num_missing

  def _check_selection(self, sent, row, selection):
    index = {node: i for i, node in enumerate(selection)}
    expected = [
      (n.token_id, index[n.parent] if n.parent else -1, n.depth)
      for n in selection
    ]
    padding = self.sizes.num_nodes - len(expected)
    expected += [(types.PLACEHOLDER_TOKEN_ID, tree_lib.NO_PARENT, 0)] * padding
    fields = (sent.token_ids, sent.parents, sent.depths)
    assert [tuple(f[row, i] for f in fields) for i in range(len(expected))] == (
      expected
    )
    assert sent.size[row] == len(selection)
    parents = sent.parents[row, 1 : len(selection)]
    assert all(0 <= p <= i for i, p in enumerate(parents))  # parents first

  def _check_tree(self, row, oracle):
    assert tree_oracle.listing(self.tree, row) == oracle.listing()
    codes = oracle.cached_codes()
    assert self.cache.keys[0][row, 0, : len(codes), 0].tolist() == codes
    assert self.cache.kv_lengths[row] == len(oracle.verified)
    slots = self.tree.cache_slots[row]
    num_expanded = (slots >= 0).sum()
    assert sorted(slots[slots >= 0]) == list(range(num_expanded))
    assert not self.tree.row_mask[row, num_expanded:].any()
    assert not self.tree.row_mask[row, :, num_expanded:].any()


# Room for all; too few places for nodes; too few rows; hardly any.
SIZES = [
  Sizes(48, 32, 3, 6, 2),
  Sizes(12, 12, 2, 5, 2),
  Sizes(40, 9, 4, 8, 3),
  Sizes(4, 3, 2, 4, 1),
]
# Few values: many ties, also between parent and child.
LOG_PROBS = [0.0, -0.25, -0.5, -0.5, -1.0, -2.0, -np.inf]


@settings(max_examples=60, deadline=None)
@given(
  st.sampled_from(SIZES),
  st.lists(
    st.lists(st.sampled_from(LOG_PROBS), min_size=3, max_size=3),
    min_size=7,
    max_size=7,
  ),
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
def test_any_game_equals_heap(sizes, log_probs, rounds):
  token_ids = (np.arange(7)[:, None] + np.arange(3)[None] * 2) % 8
  table = tree_oracle.Table(
    token_ids=token_ids.astype(np.int32),
    log_probs=np.asarray(log_probs, np.float32),
  )
  game = Game(sizes, table, [1, 2])
  selections, _ = game.play([[], []])
  for choices in rounds:
    verdicts = [
      o.verdict(s, c, 8)
      for o, s, c in zip(game.oracles, selections, choices, strict=True)
    ]
    selections, _ = game.play(verdicts)


@pytest.mark.parametrize('sizes', SIZES[:3])
def test_thousand_verdicts(sizes):
  """Weights are equal by rounding only; the batch has 16 rows."""
  rng = np.random.default_rng(0)
  logits = 2 * rng.standard_normal((31, 16)).astype(np.float32)
  log_probs, token_ids = jax.lax.top_k(jax.nn.log_softmax(logits), 4)
  table = tree_oracle.Table(
    token_ids=np.asarray(token_ids), log_probs=np.asarray(log_probs)
  )
  game = Game(sizes, table, rng.integers(0, 16, 16).tolist())
  selections, _ = game.play([[]] * 16)
  selections, _ = game.play([[]] * 16)
  seen, num_verdicts = [], 0
  while num_verdicts < 1000:
    choices = rng.integers(0, 16, (16, sizes.num_nodes))
    # Mostly the most probable children, as if the draft were good.
    choices = np.minimum(choices, rng.geometric(0.6, choices.shape) - 1)
    lengths = rng.integers(0, sizes.num_nodes + 1, 16)
    verdicts = [
      o.verdict(s, c[:n].tolist(), 16)
      for o, s, c, n in zip(
        game.oracles, selections, choices, lengths, strict=True
      )
    ]
    num_verdicts += sum(map(bool, verdicts))
    with jax.no_tracing():  # nothing is compiled again
      selections, outcomes = game.play(verdicts)
    seen += outcomes

  assert {tree_lib.HIT, tree_lib.LATE_HIT, tree_lib.MISS} == {
    outcome for outcome, _ in seen
  }
