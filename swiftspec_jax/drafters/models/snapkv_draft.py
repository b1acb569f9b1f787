"""The target drafts for itself over the tokens that attention chooses.

MagicDec (arXiv 2408.11049) with the cache of SnapKV. Before the first draft of
a row, and again when it has grown by `interval` tokens, each kv head chooses
what to keep of the text (`snapkv`). Between choices what the target verifies is
appended. Drafts write after that, where the target's keys and values of the
same places go next.

Legend: R rows, r of them no padding, C pages of a row.
"""

import dataclasses

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.cache import paged
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.models import snapkv
from swiftspec_jax.drafters.models.model_spec import TargetSpec
from swiftspec_jax.drafters.models.self_draft import TargetChains
from swiftspec_jax.drafters.spec import Setup
from swiftspec_jax.step import ragged_batch
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKVDraft(TargetSpec):
  """Drafter of an engine.

  Attributes:
    budget: tokens of a row that each kv head keeps, the latest ones included.
    window: latest tokens, which choose the others by their attention.
    pooling: odd number of neighbouring tokens that share their votes.
    interval: tokens that a row grows by before it chooses again; until then
      drafts see them, too.
  """

  budget: int = 512
  window: int = 32
  pooling: int = 5
  interval: int = 128

  def __post_init__(self):
    checks = {
      'budget': (
        self.budget > self.window,
        f'more than the {self.window} tokens of the window',
      ),
      'window': (self.window >= 1, 'at least 1'),
      'pooling': (self.pooling >= 1 and self.pooling % 2 == 1, 'odd'),
      'interval': (self.interval >= 1, 'at least 1'),
    }
    errors.check_fields(self, checks)

  def make(self, setup: Setup) -> 'SnapKVDrafter':
    return SnapKVDrafter(self, setup.sizes, setup.target)


class SnapKVDrafter(TargetChains):
  """Drafts over copies of keys and values.

  Attributes:
    cache: keys and values of all slots, C pages each.
  """

  def __init__(self, draft: SnapKVDraft, sizes: ProgramSizes, target: Target):
    """Allocates the cache."""
    super().__init__(sizes, target)
    self._draft = draft
    config = sizes.scheduler
    num_slots = config.buckets.max_rows
    self._most_held = min(draft.budget + draft.interval, config.max_context)
    most = self._most_held + config.buckets.max_length
    self._num_pages = -(-most // config.page_size)
    self.cache = paged.init(
      target.model.config,
      num_slots * self._num_pages,
      config.page_size,
      target.model.dtype,
      target.model.mesh,
    )
    self._warm_contexts: set[int] = set()
    # By slot: whose text it is, how much of it was read, and what is kept.
    self._generations = np.full(num_slots, -1)
    self._num_read = np.zeros(num_slots, np.int64)
    self._num_held = np.zeros(num_slots, np.int64)

  @property
  def name(self) -> str:
    return f'{self._model.name}_snapkv_{self._draft.budget}'

  def warm_up(self, flat: StepSizes) -> None:
    if flat.context not in self._warm_contexts:
      self._warm_contexts.add(flat.context)
      self._keep_best(0, 0, flat.context, self._made_up_texts())
    if flat.num_rows not in self._warm_rows:
      none = np.zeros(0, np.int64)
      self._append(flat.num_rows, none, none)
    super().warm_up(flat)

  def num_choices(self, num_rows: int, length: int) -> float:
    """Returns how many choices drafts of a length use up, if all stand."""
    return num_rows * (length + 1) / self._draft.interval

  def trial_choice(self, num_known: int) -> None:
    """Chooses for an invented row and waits, to measure the time.

    Only without requests.

    Args:
      num_known: tokens of the row.
    """
    num_kept = num_known - 1
    context = self._sizes.context_of(num_kept)
    self._keep_best(0, num_kept, context, self._made_up_texts())
    jax.block_until_ready(self.cache.keys)

  def _seen(self, unread, lengths):
    slots, kv_lengths, texts = unread.slots, unread.ends - 1, unread.texts
    if not texts.slot_generations[slots].all():  # invented rows
      return self._pages(slots), kv_lengths - self._num_kept(kv_lengths)
    num_new = kv_lengths - self._num_read[slots]
    is_stale = (
      (self._generations[slots] != texts.slot_generations[slots])
      | (num_new > self._sizes.scheduler.buckets.max_length + 1)
      | (self._num_held[slots] + num_new > self._most_held)
    )
    for slot, kv_length in zip(
      slots[is_stale].tolist(), kv_lengths[is_stale].tolist(), strict=True
    ):
      context = self._sizes.context_of(kv_length)
      self._keep_best(slot, kv_length, context, texts)
    num_new[is_stale] = 0
    if num_new.any():
      num_rows = self._sizes.scheduler.buckets.pad_rows(len(slots))
      self._append(num_rows, *self._moves(slots, num_new, texts))
    self._generations[slots] = texts.slot_generations[slots]
    self._num_read[slots] = kv_lengths
    self._num_held[slots] = np.where(
      is_stale, self._num_kept(kv_lengths), self._num_held[slots] + num_new
    )
    return self._pages(slots), kv_lengths - self._num_held[slots]

  def _num_kept(self, kv_lengths: np.ndarray) -> np.ndarray:
    """Returns the tokens i64[r] that choices keep of texts."""
    return np.minimum(kv_lengths, self._draft.budget)

  def _pages(self, slots: np.ndarray) -> np.ndarray:
    """Returns i64[r, C], the pages of slots."""
    return slots[:, None] * self._num_pages + np.arange(self._num_pages)

  def _keep_best(
    self, slot: int, kv_length: int, context: int, texts: SlotTexts
  ) -> None:
    """Enqueues the choice of a row of `kv_length` tokens in the cache."""
    draft, page_size = self._draft, self._sizes.scheduler.page_size
    num_columns = context // page_size
    start = max(kv_length - draft.window, 0)
    latest = texts.token_ids[slot, start : start + draft.window]
    row = snapkv.KnownRow(
      token_ids=ragged_batch.padded(latest, draft.window),
      kv_length=np.int32(kv_length),
      page_table=ragged_batch.padded(
        texts.page_table[slot, :num_columns], num_columns
      ),
      first_place=np.int32(slot * self._num_pages * page_size),
    )
    self.cache = self._call(
      snapkv.keep_best,
      self._model.params,
      self._target.cache,
      self.cache,
      self._argument(row),
      config=self._model.config,
      budget=draft.budget,
      pooling=draft.pooling,
    )

  def _moves(
    self, slots: np.ndarray, num_new: np.ndarray, texts: SlotTexts
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns places i64[any] of tokens there and here, `num_new` of a row."""
    config = self._sizes.scheduler
    rows = np.repeat(np.arange(len(slots)), num_new)
    index = np.arange(len(rows)) - (np.cumsum(num_new) - num_new)[rows]
    sources = ragged_batch.places_of(
      texts.page_table[slots],
      rows,
      self._num_read[slots][rows] + index,
      config.page_size,
      config.num_pages,
    )
    first_places = slots * self._num_pages * config.page_size
    targets = (first_places + self._num_held[slots])[rows] + index
    return sources, targets

  def _append(
    self, num_rows: int, sources: np.ndarray, targets: np.ndarray
  ) -> None:
    """Enqueues copies of tokens, room for `num_rows` rows."""
    size = num_rows * (self._sizes.scheduler.buckets.max_length + 1)
    places = self._argument(
      (
        ragged_batch.padded(sources, size),
        ragged_batch.padded(targets, size, self.cache.num_places),
      )
    )
    self.cache = self._call(
      snapkv.append, self._target.cache, self.cache, *places
    )
