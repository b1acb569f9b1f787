"""Rounds of drafting on the device, next to the oracle."""

from typing import NamedTuple

import numpy as np
import tree_oracle
from hypothesis import strategies as st

from swiftspec_jax import tree as tree_lib
from swiftspec_jax.models.cache import dense
from swiftspec_jax.tree import types

CAPACITY = 640  # tokens of a row of the cache, for some 60 rounds


class Sizes(NamedTuple):
  capacity: int
  num_cache_rows: int
  width: int
  num_nodes: int
  num_steps: int


def tables(log_probs):
  """Strategy of drafts that know three children of each of seven tokens."""
  token_ids = (np.arange(7)[:, None] + np.arange(3)[None] * 2) % 8
  rows = st.lists(st.sampled_from(log_probs), min_size=3, max_size=3)
  return st.lists(rows, min_size=7, max_size=7).map(
    lambda values: tree_oracle.Table(
      token_ids=token_ids.astype(np.int32),
      log_probs=np.asarray(values, np.float32),
    )
  )


def random_table(rng):
  logits = 2 * rng.standard_normal((7, 8)).astype(np.float32)
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  best = np.argsort(-log_probs, axis=1)[:, :3].astype(np.int32)
  return tree_oracle.Table(
    token_ids=best, log_probs=np.take_along_axis(log_probs, best, axis=1)
  )


class Game:
  """A batch of trees and caches next to their oracles."""

  def __init__(self, sizes, table, roots, chain_length=1):
    self.sizes, self.table, self.chain_length = sizes, table, chain_length
    self.num_rounds = 0
    self.tree = tree_oracle.new_tree(
      np.asarray(roots, np.int32),
      capacity=sizes.capacity,
      num_cache_rows=sizes.num_cache_rows,
      chain_length=chain_length,
    )
    rows = np.zeros((len(roots), 1, CAPACITY, 1), np.int32)
    self.cache = dense.KVCache(
      keys=[rows],
      values=[rows],
      kv_lengths=np.zeros(len(roots), np.int32),
      capacity=CAPACITY,
    )
    self.oracles = [
      tree_oracle.HeapTree(root, sizes.capacity, sizes.num_cache_rows, table)
      for root in roots
    ]

  def verdicts(self, selections, choices):
    """What choices lead to: tokens for each row, none before a selection."""
    return [
      oracle.verdict(selection, choice[: self.sizes.num_nodes], vocab_size=8)
      if selection
      else []
      for oracle, selection, choice in zip(
        self.oracles, selections, choices, strict=True
      )
    ]

  def play(self, verdicts, chains=None):
    """Plays a round; returns the selections and outcomes of the oracles.

    Args:
      verdicts: tokens for each row.
      chains: token ids i32[B, D] and log-probabilities f32[B, D] of what is
        added to the trees after the verdict.
    """
    sizes = self.sizes
    num_tokens = [len(verdict) for verdict in verdicts]
    padded = [v + [-1] * (sizes.num_nodes - len(v)) for v in verdicts]
    self.tree, self.cache, moved, sent = tree_oracle.play_round(
      self.tree,
      self.cache,
      self.table,
      np.asarray(padded, np.int32),
      np.asarray(num_tokens, np.int32),
      chains,
      num_nodes=sizes.num_nodes,
      num_steps=sizes.num_steps,
      width=sizes.width,
    )
    outcomes = [
      self._check_reroot(moved, row, verdict)
      for row, verdict in enumerate(verdicts)
    ]
    if chains is not None:
      for oracle, *row in zip(self.oracles, *chains, strict=True):
        oracle.add_chain(zip(*row, strict=True))
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
    path = committed + surviving
    assert moved.path[row, : len(path)].tolist() == path
    assert not moved.path[row, len(path) :].any()
    num_missing = len(verdict) - len(committed)
    if self.chain_length == 1:
      assert 0 <= num_missing <= (outcome == tree_lib.MISS)
    else:
      assert num_missing == 0 or outcome != tree_lib.HIT
    return outcome, num_missing

  def _check_selection(self, sent, row, selection):
    index = {node: i for i, node in enumerate(selection)}
    expected = [
      (
        n.token_id,
        index[n.parent] if n.parent else -1,
        n.depth,
        n.is_looked_up,
        n.weight,
      )
      for n in selection
    ]
    padding = self.sizes.num_nodes - len(expected)
    nothing = types.PLACEHOLDER_TOKEN_ID, tree_lib.NO_PARENT, 0, False, -np.inf
    expected += [nothing] * padding
    names = 'token_ids', 'parents', 'depths', 'is_looked_up', 'log_probs'
    fields = [getattr(sent, name) for name in names]
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
    slots = self.tree.nodes.cache_slots[row]
    num_expanded = (slots >= 0).sum()
    assert sorted(slots[slots >= 0]) == list(range(num_expanded))
    assert not self.tree.row_mask[row, num_expanded:].any()
    assert not self.tree.row_mask[row, :, num_expanded:].any()
