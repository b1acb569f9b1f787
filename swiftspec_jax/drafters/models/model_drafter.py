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
import functools
import operator
from typing import Any, Self

import jax
import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import EngineDrafter, SlotTexts
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
from swiftspec_jax.models.cache import paged
from swiftspec_jax.models.model import Model
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unread:
  """Tokens of rows that a draft model is fed.

  Attributes:
    slots: i64[r] of the rows.
    starts: i64[r] what their caches hold.
    counts: i64[r] tokens to feed.
    texts: texts of all slots.
  """

  slots: np.ndarray
  starts: np.ndarray
  counts: np.ndarray
  texts: SlotTexts

  @property
  def ends(self) -> np.ndarray:
    """i64[r] what their caches hold afterwards."""
    return self.starts + self.counts

  @property
  def page_table(self) -> np.ndarray:
    """i32[r, any]."""
    return self.texts.page_table[self.slots]


class ModelDrafter(EngineDrafter):
  """A draft model on the devices of the target.

  Attributes:
    cache: keys and values.
  """

  def __init__(self, model: Model, sizes: ProgramSizes, target: Target):
    """Allocates the cache of a model that drafts for the target."""
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
    self._call = operator.call

  @property
  def name(self) -> str:
    return self._model.name

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    plan = self._draft_prefill.plan(view, lengths)
    if plan.chunks.any():
      fed = np.flatnonzero(plan.chunks)
      self._prefill(
        Unread(
          slots=view.slots[fed],
          starts=plan.starts[fed],
          counts=plan.chunks[fed],
          texts=texts,
        )
      )
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
    num_known = view.kv_lengths[rows] + 1
    starts = (plan.starts + plan.chunks)[rows]
    unread = Unread(
      slots=view.slots[rows],
      starts=starts,
      counts=num_known - starts,
      texts=texts,
    )
    num_tokens = int(unread.counts.sum())
    sizes = self._sizes.mixed(
      view.buckets.pad_rows(len(rows)),
      # At least one more than rows, as in every step that is not plain.
      view.buckets.pad_query_tokens(max(num_tokens, len(rows) + 1)),
      int((num_known + lengths[rows]).max()),
    )
    taken = self._first_forward(sizes, unread, lengths[rows])
    # Truncation and penalties only matter to the target, which decides.
    level = self._target.sampling.level(unread.slots)
    level = min(level, slot_sampling.SamplingLevel.TEMPERATURE)
    found = self._draft_behind(*taken, int(lengths.max()), level)
    return self._slot_drafts(view, lengths, found)

  def num_unread_tokens(self, view: policies.StepView, texts: SlotTexts) -> int:
    return self._draft_prefill.num_unread_tokens(view, texts.slot_generations)

  def compiling(self) -> Self:
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
    self._prefill(self._made_up(num_known - counts, counts))
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
    made_up = self._made_up(starts, counts)
    taken = self._first_forward(flat, made_up, lengths)
    jax.block_until_ready(self._draft_behind(*taken, int(lengths.max()), level))

  def _made_up(self, starts: np.ndarray, counts: np.ndarray) -> Unread:
    return Unread(
      slots=np.arange(len(counts)),
      starts=starts,
      counts=counts,
      texts=self._made_up_texts(),
    )

  def _made_up_texts(self) -> SlotTexts:
    return SlotTexts.empty(
      self._sizes.scheduler.max_context, self._sizes.made_up_pages()
    )

  def _prefill(self, unread: Unread) -> None:
    """Feeds tokens of which none is the last one of its row."""
    buckets = self._sizes.scheduler.buckets
    sizes = self._sizes.mixed(
      buckets.pad_rows(len(unread.slots)),
      buckets.max_query_tokens,
      int(unread.ends.max()),
    )
    self.cache = self._call(
      prefill,
      self._model.params,
      self.cache,
      *self._fed(sizes, unread),
      config=self._model.config,
    )

  def _first_forward(
    self, sizes: StepSizes, unread: Unread, lengths: np.ndarray
  ) -> tuple[DraftRows, jax.Array | None, jax.Array]:
    """Feeds tokens up to the last known one of each row.

    Args:
      sizes: sizes of the program.
      unread: tokens to feed.
      lengths: i64[r] drafts that are wanted after them.

    Returns:
      The rows, and hidden states and logits as `first_logits`.
    """
    fed = self._fed(sizes, unread)
    rows = self._argument(self._rows(sizes, unread, lengths))
    self.cache, hidden, logits = self._call(
      self._first_program,
      self._model.params,
      self.cache,
      *fed,
      rows,
      config=self._model.config,
    )
    return rows, hidden, logits

  def _rows(
    self, sizes: StepSizes, unread: Unread, lengths: np.ndarray
  ) -> DraftRows:
    """Returns rows as in `_first_forward`, on the host."""
    known, slots, texts = None, unread.slots, unread.texts
    if self._reads_texts:
      known = _padded_rows(
        texts.token_ids[slots], sizes.num_rows, sizes.context
      )
    steps = np.arange(self._num_forwards, dtype=np.int32)[None]
    pad = functools.partial(ragged_batch.padded, size=sizes.num_rows)
    return DraftRows(
      slots=pad(slots),
      last=pad(np.cumsum(unread.counts) - 1),
      positions=pad(unread.ends)[:, None] + steps,
      lengths=pad(lengths),
      page_table=_padded_rows(
        unread.page_table,
        sizes.num_rows,
        sizes.context // self._sizes.scheduler.page_size,
      ),
      num_skipped=None,
      texts=known,
    )

  def _fed(
    self, sizes: StepSizes, unread: Unread
  ) -> tuple[RaggedBatch, jax.Array, TargetFeatures | None]:
    """Returns where tokens belong, the tokens i32[N], and their features."""
    config, tables = self._sizes.scheduler, unread.page_table
    pages = config.page_size, config.num_pages
    batch = ragged_batch.pack(
      sizes, unread.starts, unread.counts, tables, *pages
    )
    owners = np.repeat(np.arange(len(tables)), unread.counts)
    positions = batch.positions[: len(owners)]
    token_ids = unread.texts.token_ids[unread.slots[owners], positions]
    places = None
    if self._model.config.reads_features:
      places = ragged_batch.padded(
        ragged_batch.places_of(tables, owners, positions - 1, *pages),
        sizes.num_tokens,
      )
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
        rows.positions,
        vocab_size=self._model.config.vocab_size,
      )
    num_steps = self._argument(np.int32(self._num_steps(longest)))
    return self._propose(hidden, logits, noise, rows, num_steps, sampling)

  # Reads the rest of texts, as `first_logits`.
  _first_program = staticmethod(first_logits)

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
    """Returns the drafts, by default chains, i64[B] tokens of each row.

    Args:
      view: view of the step.
      lengths: i64[B] draft tokens.
      found: result of `_propose`.
    """
    return SlotDrafts(drafts=policies.Drafts(lengths=lengths), chains=found)


def _padded_rows(values: np.ndarray, num_rows: int, size: int) -> np.ndarray:
  """Returns i32[num_rows, size] of i32[r, any], cut or filled with zeros."""
  kept = values[:, :size]
  padded = np.zeros((num_rows, size), np.int32)
  padded[: len(kept), : kept.shape[1]] = kept
  return padded
