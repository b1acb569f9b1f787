"""A draft model in an engine: what chains and trees have in common.

Its keys and values lie in pages of its own under the numbers of the target's
pages. It reads what it misses of a text when a draft is wanted, so steps
without drafts cost it nothing: the prompt, what was decoded without it, or all
of a request that was preempted, a chunk a step (`draft_prefill`).

A draft may read features of its target (EAGLE-3 style). Those of the known
tokens lie in the target's cache, so they are there whenever the draft catches
up; after them it reads its own hidden states.

Legend: B rows of a view, R rows, N tokens, U slots, K longest draft, D forwards
of it, V vocabulary, V' of it what the draft can propose, E embed.
"""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.cache import paged
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.models.draft_forward import (
  DraftRows,
  TargetFeatures,
  first_logits,
  prefill,
)
from swiftspec_jax.drafters.models.draft_prefill import (
  DraftPrefill,
  PrefillPlan,
)
from swiftspec_jax.model import Model
from swiftspec_jax.step import (
  ahead_of_time,
  ragged_batch,
  slot_sampling,
  verify,
)
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import RaggedBatch, StepSizes
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.target import Target


class ModelDrafter:
  """A draft model on the devices of the target.

  Attributes:
    cache: keys and values.
  """

  has_programs = True
  keeps_trees = False

  def __init__(
    self,
    model: Model,
    sizes: ProgramSizes,
    target: Target,
  ):
    """Allocates the cache.

    Args:
      model: model that drafts.
      sizes: declared.
      target: model that verifies.
    """
    self._model = model
    self._sizes = sizes
    self._target = target
    config = sizes.scheduler
    num_spare = config.buckets.max_rows * self._num_spare_pages
    self.cache = paged.init(
      model.config,
      config.num_pages + num_spare,
      config.page_size,
      model.dtype,
      model.mesh,
    )
    self._argument = target.argument  # the devices are the same
    self._draft_prefill = DraftPrefill(config.buckets, self._num_unread)
    self._call = ahead_of_time.call

  @property
  def name(self) -> str:
    return self._model.name

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    plan = self._draft_prefill.plan(view, lengths)
    if plan.chunks.any():
      fed = np.flatnonzero(plan.chunks)
      self._prefill(view.slots[fed], plan.starts[fed], plan.chunks[fed], texts)
    is_late = (lengths > 0) & ~plan.is_ready
    lengths = np.where(plan.is_ready, lengths, 0)
    if lengths.any():
      drafts = self._draft_ready(view, plan, lengths, texts)
    else:
      drafts = self._target.without_drafts(lengths)
    self._draft_prefill.take(view, plan)
    return dataclasses.replace(
      drafts,
      prefills_draft=bool(plan.chunks.any()),
      is_late=is_late if is_late.any() else None,
    )

  def _draft_ready(
    self,
    view: policies.StepView,
    plan: PrefillPlan,
    lengths: np.ndarray,
    texts: SlotTexts,
  ) -> SlotDrafts:
    """Drafts i64[B] tokens for rows whose texts are read."""
    rows = np.flatnonzero(lengths)
    slots, lengths_of_rows = view.slots[rows], lengths[rows]
    num_known = view.kv_lengths[rows] + 1
    starts = (plan.starts + plan.chunks)[rows]
    counts = num_known - starts
    sizes = self._sizes.mixed(
      view.buckets.pad_rows(len(slots)),
      # At least one more than rows, as in every step that is not plain.
      view.buckets.pad_query_tokens(max(int(counts.sum()), len(slots) + 1)),
      int((num_known + lengths_of_rows).max()),
    )
    taken = self._first_forward(
      sizes, slots, starts, counts, lengths_of_rows, texts
    )
    # Truncation and penalties only matter to the target, which decides.
    level = self._target.sampling.level(slots)
    level = min(level, slot_sampling.SamplingLevel.TEMPERATURE)
    found = self._draft_behind(*taken, int(lengths.max()), level)
    return self._slot_drafts(view, lengths, found)

  def num_unread_tokens(self, view: policies.StepView, texts: SlotTexts) -> int:
    return self._draft_prefill.num_unread_tokens(view, texts.slot_generations)

  def overlap(
    self, view: policies.StepView, drafted: np.ndarray, verified: np.ndarray
  ) -> None:
    del view, drafted, verified  # target and draft take turns

  def forget(self, request_id: int) -> None:
    del request_id

  def reset(self) -> None:
    pass  # a slot begins empty for each request

  def compiling(self) -> 'ModelDrafter':
    twin = copy.copy(self)
    twin._call = ahead_of_time.compile_only
    twin._target = self._target.compiling()
    twin.cache = ahead_of_time.abstract(self.cache)
    return twin

  def warm_up(self, flat: StepSizes) -> None:
    longest = self._sizes.range_of(flat.context)[1]
    num_rows = min(flat.num_rows, flat.num_tokens)
    counts = np.full(num_rows, min(flat.num_tokens // num_rows, longest - 1))
    starts, lengths = np.zeros_like(counts), np.ones_like(counts)
    for level in (
      slot_sampling.SamplingLevel.GREEDY,
      slot_sampling.SamplingLevel.TEMPERATURE,
    ):
      self._run_made_up(flat, starts, counts, lengths, level)
    self.trial_prefill(flat.num_rows, longest)

  def trial(self, num_rows: int, num_known: int, length: int) -> None:
    buckets = self._sizes.scheduler.buckets
    num_tokens = buckets.pad_query_tokens(num_rows + 1)
    flat = self._sizes.mixed(num_rows, num_tokens, num_known + length)
    counts = np.ones(num_rows, np.int64)
    self._run_made_up(
      flat,
      counts * num_known - 1,
      counts,
      counts * length,
      slot_sampling.SamplingLevel.GREEDY,
    )

  def trial_prefill(self, num_rows: int, num_known: int) -> None:
    budget = self._sizes.scheduler.buckets.max_query_tokens
    counts = np.full(num_rows, min(budget // num_rows, num_known))
    starts = num_known - counts
    slots, texts = np.arange(num_rows), self._made_up_texts()
    self._prefill(slots, starts, counts, texts)
    jax.block_until_ready(self.cache)

  def _run_made_up(
    self,
    flat: StepSizes,
    starts: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    level: slot_sampling.SamplingLevel,
  ) -> None:
    """Drafts for rows that miss `counts` tokens, and waits."""
    slots, texts = np.arange(len(counts)), self._made_up_texts()
    taken = self._first_forward(flat, slots, starts, counts, lengths, texts)
    jax.block_until_ready(self._draft_behind(*taken, int(lengths.max()), level))

  def _made_up_texts(self) -> SlotTexts:
    return SlotTexts.empty(
      self._sizes.scheduler.max_context, self._sizes.made_up_pages()
    )

  def _prefill(
    self,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    texts: SlotTexts,
  ) -> None:
    """Feeds i64[r] tokens that rows know, from `starts` i64[r] on."""
    buckets = self._sizes.scheduler.buckets
    sizes = self._sizes.mixed(
      buckets.pad_rows(len(slots)),
      buckets.max_query_tokens,
      int((starts + counts).max()),
    )
    fed = self._fed(sizes, slots, starts, counts, texts)
    self.cache = self._call(
      prefill,
      self._model.params,
      self.cache,
      *fed,
      config=self._model.config,
    )

  def _first_forward(
    self,
    sizes: StepSizes,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    texts: SlotTexts,
  ) -> tuple[DraftRows, jax.Array, jax.Array]:
    """Feeds known tokens of rows.

    Args:
      sizes: sizes of the program.
      slots: i64[r] of the rows.
      starts: i64[r] what their caches hold.
      counts: i64[r] tokens to feed.
      lengths: i64[r] drafts that are wanted after them.
      texts: texts of all slots.

    Returns:
      The rows, and hidden states and logits as `first_logits`.
    """
    fed = self._fed(sizes, slots, starts, counts, texts)
    rows = self._argument(
      self._rows(sizes, slots, starts, counts, lengths, texts)
    )
    self.cache, hidden, logits = self._call(
      first_logits,
      self._model.params,
      self.cache,
      *fed,
      rows,
      config=self._model.config,
    )
    return rows, hidden, logits

  def _rows(
    self,
    sizes: StepSizes,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    texts: SlotTexts,
  ) -> DraftRows:
    """Returns rows as in `_first_forward`, on the host."""
    known = None
    if self._reads_texts:
      known = _padded_rows(
        texts.token_ids[slots], sizes.num_rows, sizes.context
      )
    ends, left_out = starts + counts, texts.num_left_out
    steps = np.arange(self._num_forwards, dtype=np.int32)[None]
    ends_of_target = ends if left_out is None else ends + left_out[slots]
    return DraftRows(
      slots=ragged_batch.padded(slots, sizes.num_rows),
      last=ragged_batch.padded(np.cumsum(counts) - 1, sizes.num_rows),
      positions=ragged_batch.padded(ends, sizes.num_rows)[:, None] + steps,
      noise_positions=ragged_batch.padded(ends_of_target, sizes.num_rows)[
        :, None
      ]
      + steps,
      lengths=ragged_batch.padded(lengths, sizes.num_rows),
      page_table=_padded_rows(
        texts.page_table[slots],
        sizes.num_rows,
        sizes.context // self._sizes.scheduler.page_size,
      ),
      num_skipped=None,
      texts=known,
    )

  def _fed(
    self,
    sizes: StepSizes,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    texts: SlotTexts,
  ) -> tuple[RaggedBatch, jax.Array, TargetFeatures | None]:
    """Returns where tokens belong, the tokens i32[N], and their features."""
    config = self._sizes.scheduler
    tables = texts.page_table[slots]
    batch = ragged_batch.pack(
      sizes, starts, counts, tables, config.page_size, config.num_pages
    )
    owners = np.repeat(np.arange(len(slots)), counts)
    positions = batch.positions[: len(owners)]
    token_ids = texts.token_ids[slots[owners], positions]
    places = self._places_before(sizes, tables, owners, positions)
    fed = batch, ragged_batch.padded(token_ids, sizes.num_tokens), places
    batch, token_ids, places = self._argument(fed)
    features = None
    if places is not None:
      features = TargetFeatures(pages=self._target.features, places=places)
    return batch, token_ids, features

  def _draft_behind(
    self,
    rows: DraftRows,
    hidden: jax.Array,
    logits: jax.Array,
    longest: int,
    level: slot_sampling.SamplingLevel,
  ) -> Any:
    """Returns what `_propose` does after a first forward.

    Args:
      rows: rows that were fed.
      hidden: [R, E].
      logits: f32[R, V'].
      longest: draft.
      level: level of sampling, one of the two lower ones.
    """
    sampling, noise = self._target.sampling.state(level), None
    if level != slot_sampling.SamplingLevel.GREEDY:
      noise = self._call(
        verify.make_noise,
        sampling.seeds,
        rows.slots,
        rows.positions
        if rows.noise_positions is None
        else rows.noise_positions,
        vocab_size=self._model.config.vocab_size,
      )
    num_steps = self._argument(np.int32(self._num_steps(longest)))
    return self._propose(hidden, logits, noise, rows, num_steps, sampling)

  def _places_before(
    self,
    sizes: StepSizes,
    tables: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray,
  ) -> np.ndarray | None:
    """Returns `TargetFeatures.places` if the draft reads any."""
    if not self._model.config.reads_features:
      return None
    config = self._sizes.scheduler
    places = ragged_batch.places_of(
      tables, rows, positions - 1, config.page_size, config.num_pages
    )
    return ragged_batch.padded(places, sizes.num_tokens)

  @property
  def _reads_texts(self) -> bool:
    """Whether drafts look at the known tokens."""
    return False

  @property
  def _num_unread(self) -> int | None:
    """Last known tokens that a draft leaves nothing of in the cache."""
    return 0 if self._model.config.num_layers else None

  @property
  def _num_spare_pages(self) -> int:
    """Pages of the cache for each row, besides those of the target."""
    return 0

  @property
  def _num_forwards(self) -> int:
    """D, forwards of the longest draft."""
    raise NotImplementedError

  def _num_steps(self, length: int) -> int:
    """Returns the forwards after the first one for drafts of a length."""
    raise NotImplementedError

  def _propose(
    self,
    hidden: jax.Array,
    logits: jax.Array,
    noise: jax.Array | None,
    rows: DraftRows,
    num_steps: jax.Array,
    sampling: sampling_lib.SamplingState,
  ) -> Any:
    """Enqueues the forwards after the first one; returns the drafts.

    Args:
      hidden: [R, E] of the last known tokens.
      logits: f32[R, V'] after them, of the draft's output vocabulary.
      noise: f32[R, D, V] of the target, None where all slots are greedy.
      rows: rows to draft for.
      num_steps: i32[] forwards.
      sampling: sampling parameters of the slots.
    """
    raise NotImplementedError

  def _slot_drafts(
    self, view: policies.StepView, lengths: np.ndarray, found: Any
  ) -> SlotDrafts:
    """Returns the drafts, i64[B] tokens of each row.

    Args:
      view: view of the step.
      lengths: i64[B] draft tokens.
      found: result of `_propose`.
    """
    raise NotImplementedError


def _padded_rows(values: np.ndarray, num_rows: int, size: int) -> np.ndarray:
  """Returns i32[num_rows, size] of i32[r, any], cut or filled with zeros."""
  kept = values[:, :size]
  padded = np.zeros((num_rows, size), np.int32)
  padded[: len(kept), : kept.shape[1]] = kept
  return padded
