"""The draft's state: rows on its devices, and a cache apart to prefill in."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from swiftspec_jax import buckets, prefill, spec_step, types
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafting import (
  draft_prefill,
  forced_acceptance,
  text_lookup,
  tree_draft,
)
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import target_rows
from swiftspec_jax.requests import Request


class DraftRows:
  """Owns the tree states of B rows of a draft model."""

  def __init__(self, draft: Model, tree_config: TreeConfig, batch_size: int):
    """Allocates nothing yet."""
    self.state: tree_draft.TreeDraftState | None = None
    self._row_state: tree_draft.TreeDraftState | None = None
    # [1, S, D] of the token before each one of a prompt, where the draft reads
    # features.
    self._features_before: jax.Array | None = None
    self._capacity = 0  # tokens of prompt and output
    self._draft = draft
    # Models have up to thousands of them, too many to list for each request.
    self._control_token_ids = tokenizer_lib.control_token_ids(draft.tokenizer)
    self._tree_config = tree_config
    self._batch_size = batch_size
    self._is_busy = np.zeros(batch_size, bool)

  def prepare(self, limit: int) -> None:
    """Makes room for `limit` tokens in each row."""
    capacity = buckets.power_of_two(limit)
    is_lost = target_rows.is_lost(
      (self.state, self._row_state, self._features_before)
    )
    if capacity != self._capacity or is_lost:
      self._capacity = capacity
      self.state = self._row_state = None  # free them first
      self.state = self._init_state(self._batch_size)
      self._row_state = self._init_state(1)
      self._features_before = self._init_features_before()
    self.make_idle()

  def admit(
    self,
    slot: int,
    request: Request,
    chunks: Sequence[buckets.Chunk],
    features: Sequence[jax.Array | None],
  ) -> None:
    """Prefills a request on its own and puts it into a row.

    Args:
      slot: the row.
      request: new request.
      chunks: parts of the prompt.
      features: outputs of the target for each chunk, [1, C, H] on any devices;
        None where the draft reads none.
    """
    prompt = np.asarray(request.token_ids, np.int32)
    cache, feature_state = self._prefill(prompt, chunks, features)
    # The last token of the prompt is the root.
    tree = tree_draft.new_tree(self._tree_config, prompt[-1:])
    lookup = text_lookup.make_row(
      self._tree_config,
      request.token_ids,
      self._capacity,
      self._control_token_ids,
    )
    state = self._row_state.replace(
      cache=cache,
      tree=self._on_mesh(tree),
      outcome=self._on_mesh(np.zeros(1, np.int32)),
      is_busy=self._on_mesh(np.ones(1, bool)),
      before=self._on_mesh(np.full(1, types.PLACEHOLDER_TOKEN_ID, np.int32)),
      reference=self._on_mesh(self._reference(request)),
      lookup=self._on_mesh(lookup),
      features=feature_state,
    )
    self.state = spec_step.insert_row(
      self.state, state, self._on_mesh(np.int32(slot))
    )
    self._row_state = state
    self._is_busy[slot] = True

  def stop(self, slot: int) -> None:
    """Makes a row idle; it keeps what it has."""
    self._is_busy[slot] = False
    self._set_busy()

  def make_idle(self) -> None:
    """Makes all rows idle; they keep what they have."""
    self._is_busy[:] = False
    self._set_busy()

  def clear_trees(self) -> None:
    """Makes each tree a root that is not expanded, in rows that are busy."""
    roots = np.zeros(self._batch_size, np.int32)
    tree = self._on_mesh(tree_draft.new_tree(self._tree_config, roots))
    self._is_busy[:] = True
    self._set_busy()
    self.state = self.state.replace(tree=tree)

  def _set_busy(self) -> None:
    is_busy = self._on_mesh(self._is_busy.copy())
    self.state = self.state.replace(is_busy=is_busy)

  def _prefill(self, prompt, chunks, features):
    """Returns the cache and the feature state of a prompt."""
    padded = np.zeros((1, self._row_state.cache.capacity), np.int32)
    padded[0, : len(prompt)] = prompt
    cache = self._row_state.cache.replace(
      kv_lengths=self._on_mesh(np.zeros(1, np.int32))
    )
    before_next = None
    for (start, size, num_kept), found in zip(chunks, features, strict=True):
      counts = [
        self._on_mesh(np.full(1, count, np.int32))
        for count in (start, num_kept)
      ]
      token_ids = self._on_mesh(padded[:, start : start + size])
      sizes = {
        'config': self._draft.config,
        'context': buckets.context_of(start + size, cache.capacity),
      }
      if found is None:
        cache, _ = prefill.prefill_chunk(
          self._draft.params, cache, token_ids, *counts, **sizes
        )
      else:
        cache, self._features_before, before_next = draft_prefill.prefill_chunk(
          self._draft.params,
          cache,
          self._features_before,
          token_ids,
          self._on_mesh(found),
          *counts,
          **sizes,
        )
    state = self._row_state.features
    if state is None:
      return cache, None
    if before_next is None:  # the prompt is the root alone
      before_next = self._on_mesh(
        np.zeros(state.before_root.shape, state.before_root.dtype)
      )
    return cache, state.replace(before_root=before_next)

  def _reference(self, request):
    if self._tree_config.forced_acceptance is None:
      return None
    return forced_acceptance.make_reference(
      request.token_ids + request.reference_token_ids,
      request.sampling.seed,
      self._capacity,
    )

  def _init_state(self, batch_size):
    return tree_draft.init(
      self._draft.config,
      self._tree_config,
      self._draft.dtype,
      batch_size=batch_size,
      capacity=self._capacity,
      mesh=self._draft.mesh,
    )

  def _init_features_before(self):
    if not self._draft.config.reads_features:
      return None
    shape = (1, self._row_state.cache.capacity, self._draft.config.hidden_dim)
    return self._on_mesh(np.zeros(shape, self._draft.dtype))

  def _on_mesh(self, tree: Any) -> Any:
    return sharding_lib.replicate(tree, self._draft.mesh)
