"""The target's state: rows on its devices, and one apart to prefill in."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from swiftspec_jax import buckets, prefill, types
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.cache import dense
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.model import Model
from swiftspec_jax.requests import Request
from swiftspec_jax.step import rows as rows_lib


class TargetRows:
  """Owns the target's state of B rows, that of its drafter included."""

  def __init__(
    self,
    target: Model,
    drafter: Drafter,
    draft_params: Any,
    *,
    batch_size: int,
    num_query_tokens: int,
    feature_layers: tuple[int, ...] = (),
  ):
    """Allocates nothing yet.

    Args:
      target: model whose state it is.
      drafter: drafter that shares its devices.
      draft_params: parameters of the drafter.
      batch_size: B.
      num_query_tokens: T, most tokens of one target forward.
      feature_layers: indices of layers whose outputs the draft reads.
    """
    self.capacity = 0
    self.state: types.DecodeState | None = None
    self._row_state: types.DecodeState | None = None
    self._limits = np.zeros(batch_size, np.int32)
    self._sampling = [SamplingParams()] * batch_size
    # Requests that use all that the programs of a round are compiled for.
    self._features: list[SamplingParams] = []
    self._target = target
    self._drafter = drafter
    self._draft_params = draft_params
    self._batch_size = batch_size
    self._num_query_tokens = num_query_tokens
    self._feature_layers = feature_layers

  def prepare(self, limit: int, sampling: Sequence[SamplingParams]) -> None:
    """Makes all rows idle; allocates if they have another capacity."""
    # Of no request yet, as the states are made.
    self._features = []
    # As many for plain decoding as for short drafts: they share programs.
    num_scratch = max(math.ceil((self._num_query_tokens + 1) / 8) * 8, 16)
    capacity = buckets.power_of_two(limit) + num_scratch
    if capacity != self.capacity or is_lost((self.state, self._row_state)):
      self.capacity = capacity
      self.state = self._row_state = None  # free them first
      self.state = self._init_state(self._batch_size)
      self._row_state = self._init_state(1)
    self._limits[:] = 0
    self._sampling = [SamplingParams()] * self._batch_size
    for params in sampling:
      self._add_features(params)
    self.state = self.state.replace(
      max_lengths=self._on_mesh(self._limits.copy()),
      sampling=self._sampling_state(self._sampling),
    )

  def admit(
    self,
    slot: int,
    request: Request,
    limit: int,
    chunks: Iterable[buckets.Chunk],
  ) -> None:
    """Prefills a request on its own and puts it into a row."""
    prompt = np.asarray(request.token_ids, np.int32)
    token_ids = np.zeros((1, self.capacity), np.int32)
    token_ids[0, : len(prompt)] = prompt
    counts = {
      'lengths': len(prompt),
      'prompt_lengths': len(prompt),
      'max_lengths': limit,
    }
    counts = {k: np.full(1, v, np.int32) for k, v in counts.items()}
    state = self._row_state.replace(
      **self._on_mesh({'token_ids': token_ids, **counts})
    )
    state = state.replace(
      target_cache=state.target_cache.replace(
        kv_lengths=self._on_mesh(np.zeros(1, np.int32))
      )
    )
    for start, size, num_kept in chunks:
      chunk = self._on_mesh(
        (
          token_ids[:, start : start + size],
          np.full(1, start, np.int32),
          np.full(1, num_kept, np.int32),
        )
      )
      context = buckets.context_of(start + size, self.capacity)
      cache = prefill.prefill_chunk(
        self._target.params,
        state.target_cache,
        *chunk,
        config=self._target.config,
        context=context,
      )
      draft_state = self._drafter.prefill(
        self._draft_params, state.draft_state, *chunk, context
      )
      state = state.replace(target_cache=cache, draft_state=draft_state)
    self._row_state = state
    self._limits[slot] = limit
    self._sampling[slot] = request.sampling
    if self._add_features(request.sampling):
      self.state = self.state.replace(
        sampling=self._sampling_state(self._sampling)
      )
    self.state = rows_lib.insert_row(
      self.state,
      state.replace(sampling=self._sampling_state([request.sampling])),
      self._on_mesh(np.int32(slot)),
    )

  def _add_features(self, sampling: SamplingParams) -> bool:
    """Takes note of what a request uses; returns whether that is new."""
    before = self._shapes(self._features)
    is_new = self._shapes([*self._features, sampling]) != before
    if is_new:
      self._features.append(sampling)
    return is_new

  def stop(self, slot: int) -> None:
    """Makes a row idle; needs no program, so that nothing is waited for."""
    self._limits[slot] = 0
    self.state = self.state.replace(
      max_lengths=self._on_mesh(self._limits.copy())
    )

  def fill(self, length: int, *, repeats: bool = True) -> None:
    """Pretends that idle rows know texts; a length of 0 undoes it.

    For measuring: the longer the text, the more time tokens beside the first
    one take.

    Args:
      length: tokens of each text.
      repeats: whether they are all the same, so that lookups find something;
        else all differ.
    """
    text = np.arange(self.capacity, dtype=np.int32) * (not repeats)
    token_ids = np.tile(text, (self._batch_size, 1))
    # Both are donated, so each needs an array of its own.
    lengths, kv_lengths = (
      self._on_mesh(np.full(self._batch_size, length, np.int32))
      for _ in range(2)
    )
    cache = self.state.target_cache.replace(kv_lengths=kv_lengths)
    self.state = self.state.replace(
      token_ids=self._on_mesh(token_ids), lengths=lengths, target_cache=cache
    )

  def _init_state(self, batch_size: int) -> types.DecodeState:
    config, mesh = self._target.config, self._target.mesh
    cache = dense.KVCacheConfig.of_model(
      config,
      batch_size,
      self.capacity,
      self._target.dtype,
      self._feature_layers,
    )

    def zeros(*shape):
      return self._on_mesh(np.zeros(shape, np.int32))

    return types.DecodeState(
      token_ids=zeros(batch_size, self.capacity),
      lengths=zeros(batch_size),
      prompt_lengths=zeros(batch_size),
      max_lengths=zeros(batch_size),
      target_cache=cache.init(mesh),
      draft_state=self._drafter.init(batch_size, self.capacity, mesh),
      sampling=self._sampling_state([SamplingParams()] * batch_size),
    )

  def _on_mesh(self, tree: Any) -> Any:
    return sharding_lib.replicate(tree, self._target.mesh)

  def _sampling_state(
    self, rows: Sequence[SamplingParams]
  ) -> sampling_lib.SamplingState:
    config = self._target.config
    state = sampling_lib.make_state(
      rows,
      config.vocab_size,
      self._features,
      eos_token_ids=config.eos_token_ids,
    )
    return self._on_mesh(state)

  def _shapes(self, features: Sequence[SamplingParams]) -> Any:
    """Returns what programs for requests with these features depend on."""
    state = sampling_lib.make_state(
      [SamplingParams()], self._target.config.vocab_size, features
    )
    return jax.tree.map(np.shape, state)


def is_lost(states: Any) -> bool:
  """Whether Ctrl-C came between a donation and the new state."""
  return any(x.is_deleted() for x in jax.tree.leaves(states))
