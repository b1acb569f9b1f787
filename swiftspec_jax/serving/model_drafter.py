"""A draft model in an engine: what chains and trees have in common.

Its keys and values lie in pages of its own under the numbers of the target's
pages. It takes in what it misses of a text when a draft is wanted, so steps
without drafts cost it nothing: the prompt, what was decoded without it, or all
of a request that was preempted. A row that misses more than a step has room
for has no draft until it has caught up.

Legend: B rows of a view, R rows, N tokens, U slots, K longest draft, D forwards
of it, C pages under the attention, V vocabulary.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import struct

from swiftspec_jax import policies, sharding
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.serving import choices, flat_batch, paged_forward
from swiftspec_jax.serving.drafters import SlotDrafts, SlotTexts
from swiftspec_jax.serving.flat_batch import FlatBatch, FlatSizes
from swiftspec_jax.serving.program_sizes import ProgramSizes


@struct.dataclass(frozen=True, kw_only=True)
class DraftRows:
  """Rows that get a draft; padding has length 0."""

  slots: jax.Array  # i32[R]
  last: jax.Array  # i32[R] the last known token, among the N
  positions: jax.Array  # i32[R, D] behind the last known token
  lengths: jax.Array  # i32[R]
  page_table: jax.Array  # i32[R, C]


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def first_logits(
  params: Params,
  cache: paged.PagedCache,
  batch: FlatBatch,
  token_ids: jax.Array,
  rows: DraftRows,
  *,
  config: ModelConfig,
) -> tuple[paged.PagedCache, jax.Array]:
  """Takes in what is missing; returns the cache and logits f32[R, V] behind it.

  Args:
    params: of the draft.
    cache: donated.
    batch: where the tokens belong.
    token_ids: i32[N].
    rows: to draft for.
    config: of the draft; static.
  """
  hidden, cache = paged_forward.forward(params, config, token_ids, batch, cache)
  return cache, paged_forward.logits_of(params, config, hidden[rows.last])


class ModelDrafter:
  """A draft model on the devices of the target.

  Attributes:
    cache: keys and values.
  """

  def __init__(
    self,
    model: Model,
    sizes: ProgramSizes,
    sampling: choices.SlotSampling,
  ):
    """Allocates the cache.

    Args:
      model: that drafts.
      sizes: declared.
      sampling: of the target.
    """
    self._model = model
    self._sizes = sizes
    self._sampling = sampling
    config = sizes.scheduler
    self.cache = paged.init(
      model.config, config.num_pages, config.page_size, model.dtype, model.mesh
    )
    self._replicated = sharding.replicated(model.mesh)
    num_slots = config.buckets.max_rows
    self._num_cached = np.zeros(num_slots, np.int64)
    self._num_tenants = np.zeros(num_slots, np.int64)

  @property
  def name(self) -> str:
    return self._model.name

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    is_new = self._num_tenants != texts.num_tenants
    self._num_cached[is_new] = 0
    self._num_tenants[:] = texts.num_tenants
    known = view.kv_lengths + 1
    missing = known - self._num_cached[view.slots]
    counts = _shares(missing, lengths > 0, view.buckets.max_query_tokens)
    rows = np.flatnonzero(counts)
    drafted = np.where(counts == missing, lengths, 0)
    slots, counts = view.slots[rows], counts[rows]
    found = self._run(slots, counts, drafted[rows], texts)
    self._num_cached[slots] += counts
    return self._slot_drafts(view, drafted, found)

  def forget(self, request_id: int) -> None:
    del request_id

  def num_programs(self, sizes: ProgramSizes) -> int:
    return len(list(sizes.all_mixed()))

  def warm_up(self, sizes: ProgramSizes, texts: np.ndarray) -> Iterator[None]:
    seen = set()
    for flat in sizes.all_mixed():
      num_rows = min(flat.num_rows, flat.num_tokens)
      counts = np.full(num_rows, flat.num_tokens // num_rows)
      # Only the first forward knows the number of tokens.
      kind = flat.num_rows, flat.context
      levels = [choices.Level.GREEDY, choices.Level.TEMPERATURE]
      if counts[0] < min(flat.context, texts.shape[1]):
        for level in levels[: 1 if kind in seen else 2]:
          self._run_made_up(flat, counts, counts * 0 + 1, level)
        seen.add(kind)
      yield

  def trial(self, num_rows: int, context: int, length: int) -> None:
    buckets = self._sizes.scheduler.buckets
    num_tokens = buckets.pad_query_tokens(num_rows + 1)
    flat = self._sizes.mixed(num_rows, num_tokens, context)
    counts = np.ones(num_rows, np.int64)
    self._run_made_up(flat, counts, counts * length, choices.Level.GREEDY)

  def _run_made_up(
    self,
    flat: FlatSizes,
    counts: np.ndarray,
    lengths: np.ndarray,
    level: choices.Level,
  ) -> None:
    """Drafts behind texts of `counts` tokens in page 0, and waits."""
    config = self._sizes.scheduler
    width = self._sizes.contexts[-1] // config.page_size
    num_slots = config.buckets.max_rows
    texts = SlotTexts(
      token_ids=np.zeros((num_slots, config.max_context), np.int32),
      num_tenants=self._num_tenants,
      page_table=np.zeros((num_slots, width), np.int32),
    )
    slots = np.arange(len(counts))
    jax.block_until_ready(
      self._dispatch(flat, slots, counts * 0, counts, lengths, texts, level)
    )

  def _run(
    self,
    slots: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    texts: SlotTexts,
  ) -> Any:
    """Returns what `_propose` does for rows that miss `counts` tokens."""
    buckets = self._sizes.scheduler.buckets
    starts = self._num_cached[slots]
    longest = int((starts + counts + lengths).max())
    sizes = self._sizes.mixed(
      buckets.pad_rows(len(slots)),
      # At least one more than rows, as in every step that is not plain.
      buckets.pad_query_tokens(max(int(counts.sum()), len(slots) + 1)),
      longest,
    )
    # Truncation and penalties only matter to the target, which decides.
    level = min(self._sampling.level(slots), choices.Level.TEMPERATURE)
    return self._dispatch(sizes, slots, starts, counts, lengths, texts, level)

  def _dispatch(
    self,
    sizes: FlatSizes,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    texts: SlotTexts,
    level: choices.Level,
  ) -> Any:
    config = self._sizes.scheduler
    tables = texts.page_table[slots]
    batch = flat_batch.pack(
      sizes, starts, counts, tables, config.page_size, config.num_pages
    )
    rows = np.repeat(np.arange(len(slots)), counts)
    token_ids = np.zeros(sizes.num_tokens, np.int32)
    positions = batch.positions[: len(rows)]
    token_ids[: len(rows)] = texts.token_ids[slots[rows], positions]
    width = sizes.context // config.page_size
    page_table = np.zeros((sizes.num_rows, width), np.int32)
    page_table[: len(slots), : tables.shape[1]] = tables[:, :width]
    rows = DraftRows(
      slots=_padded(slots, sizes.num_rows),
      last=_padded(np.cumsum(counts) - 1, sizes.num_rows),
      positions=_padded(starts + counts, sizes.num_rows)[:, None]
      + np.arange(self._num_forwards, dtype=np.int32)[None],
      lengths=_padded(lengths, sizes.num_rows),
      page_table=page_table,
    )
    num_steps = np.int32(self._num_steps(int(lengths.max())))
    batch, token_ids, rows, num_steps = jax.device_put(
      (batch, token_ids, rows, num_steps), self._replicated
    )
    params, config = self._model.params, self._model.config
    sampling = self._sampling.state(level)
    self.cache, logits = first_logits(
      params, self.cache, batch, token_ids, rows, config=config
    )
    noise = None
    if level != choices.Level.GREEDY:
      vocab_size = self._model.config.vocab_size
      noise = choices.make_noise(
        sampling.seeds, rows.slots, rows.positions, vocab_size=vocab_size
      )
    return self._propose(logits, noise, rows, num_steps, sampling)

  @property
  def _num_forwards(self) -> int:
    """D, forwards of the longest draft."""
    raise NotImplementedError

  def _num_steps(self, length: int) -> int:
    """Returns the forwards behind the first one for drafts of a length."""
    raise NotImplementedError

  def _propose(
    self,
    logits: jax.Array,
    noise: jax.Array | None,
    rows: DraftRows,
    num_steps: jax.Array,
    sampling: sampling_lib.SamplingState,
  ) -> Any:
    """Enqueues the forwards behind the first one; returns the drafts.

    Args:
      logits: f32[R, V] behind the last known tokens.
      noise: f32[R, D, V] of the target, None where all slots are greedy.
      rows: to draft for.
      num_steps: i32[] forwards.
      sampling: of the slots.
    """
    raise NotImplementedError

  def _slot_drafts(
    self, view: policies.StepView, lengths: np.ndarray, found: Any
  ) -> SlotDrafts:
    """Returns the drafts, i64[B] tokens of each row.

    Args:
      view: of the step.
      lengths: i64[B] draft tokens.
      found: of `_propose`.
    """
    raise NotImplementedError


def _shares(
  missing: np.ndarray, is_wanted: np.ndarray, room: int
) -> np.ndarray:
  """Returns how many i64[B] of its missing tokens each row takes in.

  Rows that miss least come first: they have their drafts soonest.
  """
  order = np.argsort(missing, kind='stable')
  wanted = np.where(is_wanted, missing, 0)[order]
  ends = np.minimum(np.cumsum(wanted), room)
  shares = np.zeros_like(missing)
  shares[order] = np.diff(ends, prepend=0)
  return shares


def _padded(values: np.ndarray, size: int) -> np.ndarray:
  padded = np.zeros(size, np.int32)
  padded[: len(values)] = values
  return padded
