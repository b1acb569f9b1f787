"""The draft's state: rows on its devices, and a cache apart to prefill in."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from swiftspec_jax import buckets, spec_step
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafting import forced_acceptance, text_lookup, tree_draft
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import target_rows
from swiftspec_jax.requests import Request


class DraftRows:
  """Owns the tree states of B rows of a draft model."""

  def __init__(self, draft: Model, tree_config: TreeConfig, batch_size: int):
    """Allocates nothing yet."""
    self.state: tree_draft.TreeDraftState | None = None
    self._row_state: tree_draft.TreeDraftState | None = None
    self._capacity = 0  # tokens of prompt and output
    self._draft = draft
    self._tree_config = tree_config
    self._batch_size = batch_size

  def prepare(self, limit: int) -> None:
    """Makes room for `limit` tokens in each row."""
    capacity = buckets.power_of_two(limit)
    is_lost = target_rows.is_lost((self.state, self._row_state))
    if capacity != self._capacity or is_lost:
      self._capacity = capacity
      self.state = self._row_state = None  # free them first
      self.state = self._init_state(self._batch_size)
      self._row_state = self._init_state(1)

  def admit(
    self, slot: int, request: Request, chunks: Iterable[buckets.Chunk]
  ) -> None:
    """Prefills a request on its own and puts it into a row."""
    prompt = np.asarray(request.token_ids, np.int32)
    padded = np.zeros((1, self._row_state.cache.capacity), np.int32)
    padded[0, : len(prompt)] = prompt
    cache = self._row_state.cache.replace(
      kv_lengths=self._on_mesh(np.zeros(1, np.int32))
    )
    for start, size, num_kept in chunks:
      cache = tree_draft.prefill_chunk(
        self._draft.params,
        cache,
        self._on_mesh(padded[:, start : start + size]),
        self._on_mesh(np.full(1, start, np.int32)),
        self._on_mesh(np.full(1, num_kept, np.int32)),
        config=self._draft.config,
        context=buckets.context_of(start + size, cache.capacity),
      )
    # The last token of the prompt is the root.
    tree = tree_draft.new_tree(self._tree_config, prompt[-1:])
    lookup = text_lookup.make_row(
      self._tree_config, request.token_ids, self._capacity
    )
    state = self._row_state.replace(
      cache=cache,
      tree=self._on_mesh(tree),
      outcome=self._on_mesh(np.zeros(1, np.int32)),
      reference=self._on_mesh(self._reference(request)),
      lookup=self._on_mesh(lookup),
    )
    self.state = spec_step.insert_row(
      self.state, state, self._on_mesh(np.int32(slot))
    )
    self._row_state = state

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

  def _on_mesh(self, tree: Any) -> Any:
    return jax.device_put(tree, sharding_lib.replicated(self._draft.mesh))
