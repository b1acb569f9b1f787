"""The target drafts for itself, over a small part of each row's text.

MagicDec (arXiv 2408.11049). At long contexts and in large batches a step takes
most of its time to read keys and values. A draft reads few of them if it sees
the first tokens of a row and the latest ones: an attention sink and a window,
as in StreamingLLM. It is still right most of the time.

The pages are those of the target, and so are the positions: a row has another
page table, without the pages in the middle. What a draft writes lies where the
target writes the same tokens next, before it reads them.

Legend: B rows of a view, R rows, r of them no padding, C pages that a draft
sees, E embed, V vocabulary.
"""

import dataclasses
import functools

import jax
import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.models.draft_chain import ChainDrafter
from swiftspec_jax.drafters.models.draft_forward import DraftRows, feed
from swiftspec_jax.drafters.models.model_spec import TargetSpec
from swiftspec_jax.drafters.spec import Setup
from swiftspec_jax.models.params import Params
from swiftspec_jax.step import ahead_of_time, slot_sampling
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes, padded
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfDraft(TargetSpec):
  """Drafter of an engine.

  Attributes:
    num_sink_tokens: first tokens of a row that a draft sees, in whole pages.
    window: latest tokens that it sees at least.
  """

  num_sink_tokens: int = 16
  window: int = 496

  def __post_init__(self):
    checks = {
      'num_sink_tokens': (self.num_sink_tokens >= 0, '0 or more'),
      'window': (self.window >= 1, 'at least 1'),
    }
    errors.check_fields(self, checks)

  def make(self, setup: Setup) -> 'SelfDrafter':
    return SelfDrafter(self, setup.sizes, setup.target)


def sparse_pages(
  page_table: np.ndarray,
  last: np.ndarray,
  page_size: int,
  num_pages: int,
  num_sink_pages: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first pages of rows and those up to a place.

  Args:
    page_table: i32[r, any].
    last: i64[r] place of the last token that has to be in a page.
    page_size: tokens of a page.
    num_pages: C, more than `num_sink_pages`.
    num_sink_pages: number of first pages.

  Returns:
    Page tables i32[r, C], and the tokens i64[r] between sink and window.
  """
  num_skipped = np.maximum(last // page_size + 1 - num_pages, 0)
  columns = np.arange(num_pages)
  is_late = columns >= num_sink_pages
  columns = columns + is_late * num_skipped[:, None]
  # After the end of a table nothing is visible.
  columns = np.minimum(columns, page_table.shape[1] - 1)
  return np.take_along_axis(page_table, columns, 1), num_skipped * page_size


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def last_logits(
  params: Params,
  cache: paged.PagedCache,
  token_ids: jax.Array,
  rows: DraftRows,
  *,
  config: ModelConfig,
) -> tuple[paged.PagedCache, jax.Array, jax.Array]:
  """Feeds the last known token of each row.

  Args:
    params: parameters of the target.
    cache: donated.
    token_ids: i32[R].
    rows: rows to draft for.
    config: configuration of the target; static.

  Returns:
    The cache, hidden states [R, E], and logits f32[R, V].
  """
  positions = rows.positions[:, 0] - 1
  hidden, cache, logits = feed(
    params, config, cache, token_ids, positions, rows.lengths > 0, rows
  )
  return cache, hidden, logits


class TargetChains(ChainDrafter):
  """Base of drafters whose model is the target itself, over a part of texts.

  What they draft with is right there, so no text is ever late.
  """

  def __init__(self, sizes: ProgramSizes, target: Target):
    """Allocates nothing.

    Args:
      sizes: declared.
      target: model that drafts and verifies.
    """
    self._model = target.model
    self._sizes = sizes
    self._target = target
    self._argument = target.argument
    self._call = ahead_of_time.call
    self._warm_rows: set[int] = set()

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    rows = np.flatnonzero(lengths)
    slots, kv_lengths = view.slots[rows], view.kv_lengths[rows]
    num_rows = view.buckets.pad_rows(len(rows))
    level = self._target.sampling.level(slots)
    found = self._chains(
      num_rows,
      slots,
      kv_lengths,
      lengths[rows],
      min(level, slot_sampling.SamplingLevel.TEMPERATURE),
      texts,
      self._seen(num_rows, slots, kv_lengths, lengths[rows], texts),
    )
    return self._slot_drafts(view, lengths, found)

  def _seen(
    self,
    num_rows: int,
    slots: np.ndarray,
    kv_lengths: np.ndarray,
    lengths: np.ndarray,
    texts: SlotTexts,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns what drafts see, with room for what they write.

    Args:
      num_rows: R, a declared size.
      slots: i64[r].
      kv_lengths: i64[r] tokens in the target's cache.
      lengths: i64[r], at least 1.
      texts: texts of all slots.

    Returns:
      Page tables i32[r, C], and the tokens i64[r] that they lack.
    """
    raise NotImplementedError

  def _made_up_seen(
    self,
    num_rows: int,
    slots: np.ndarray,
    kv_lengths: np.ndarray,
    lengths: np.ndarray,
    texts: SlotTexts,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `_seen` does, of invented rows."""
    return self._seen(num_rows, slots, kv_lengths, lengths, texts)

  def _chains(
    self,
    num_rows: int,
    slots: np.ndarray,
    kv_lengths: np.ndarray,
    lengths: np.ndarray,
    level: slot_sampling.SamplingLevel,
    texts: SlotTexts,
    seen: tuple[np.ndarray, np.ndarray],
  ) -> jax.Array:
    """Enqueues the drafts i32[U, K] of rows.

    Args:
      num_rows: same as in `_seen`.
      slots: same as in `_seen`.
      kv_lengths: same as in `_seen`.
      lengths: same as in `_seen`.
      level: level of sampling, one of the two lower ones.
      texts: texts of all slots.
      seen: result of `_seen`.
    """
    steps = np.arange(self._num_forwards)
    columns = {
      'slots': slots,
      'last': np.arange(len(slots)),
      'positions': kv_lengths[:, None] + 1 + steps,
      'lengths': lengths,
      'page_table': seen[0],
      'num_skipped': seen[1],
    }
    token_ids = texts.token_ids[slots, kv_lengths]
    fed, columns = self._argument(
      jax.tree.map(
        functools.partial(padded, size=num_rows), (token_ids, columns)
      )
    )
    rows = DraftRows(**columns, texts=None)
    self.cache, hidden, logits = self._call(
      last_logits,
      self._model.params,
      self.cache,
      fed,
      rows,
      config=self._model.config,
    )
    return self._draft_behind(rows, hidden, logits, int(lengths.max()), level)

  def num_unread_tokens(self, view: policies.StepView, texts: SlotTexts) -> int:
    del view, texts
    return 0

  def commit(
    self,
    view: policies.StepView,
    drafted: np.ndarray,
    verified: np.ndarray,
    accepted: np.ndarray,
    is_present: np.ndarray,
  ) -> None:
    del view, drafted, verified, accepted, is_present

  def warm_up(self, flat: StepSizes) -> None:
    if flat.num_rows in self._warm_rows:
      return  # neither tokens nor context make a difference
    self._warm_rows.add(flat.num_rows)
    for level in (
      slot_sampling.SamplingLevel.GREEDY,
      slot_sampling.SamplingLevel.TEMPERATURE,
    ):
      self._run_made_up(flat.num_rows, 1, 1, level)

  def trial(self, num_rows: int, num_known: int, length: int) -> None:
    jax.block_until_ready(
      self._run_made_up(
        num_rows, num_known, length, slot_sampling.SamplingLevel.GREEDY
      )
    )

  def trial_prefill(self, num_rows: int, num_known: int) -> None:
    del num_rows, num_known  # nothing is ever late

  def _run_made_up(
    self,
    num_rows: int,
    num_known: int,
    length: int,
    level: slot_sampling.SamplingLevel,
  ) -> jax.Array:
    ones, texts = np.ones(num_rows, np.int64), self._made_up_texts()
    rows = np.arange(num_rows), ones * num_known - 1, ones * length
    seen = self._made_up_seen(num_rows, *rows, texts)
    return self._chains(num_rows, *rows, level, texts, seen)


class SelfDrafter(TargetChains):
  """Drafts over pages of the target; its cache has all of the text already."""

  def __init__(self, draft: SelfDraft, sizes: ProgramSizes, target: Target):
    """Allocates nothing.

    Args:
      draft: options.
      sizes: declared.
      target: model that drafts and verifies.
    """
    super().__init__(sizes, target)
    self._draft = draft
    page_size = sizes.scheduler.page_size
    most = draft.window + sizes.scheduler.buckets.max_length - 1
    self._num_sink_pages = -(-draft.num_sink_tokens // page_size)
    # One more, as the window need not begin with a page.
    self._num_pages = self._num_sink_pages + -(-most // page_size) + 1

  @property
  def cache(self) -> paged.PagedCache:
    return self._target.cache

  @cache.setter
  def cache(self, cache: paged.PagedCache) -> None:
    self._target.cache = cache

  @property
  def name(self) -> str:
    draft = self._draft
    return f'{self._model.name}_self_{draft.num_sink_tokens}_{draft.window}'

  def _seen(self, num_rows, slots, kv_lengths, lengths, texts):
    del num_rows
    return sparse_pages(
      texts.page_table[slots],
      kv_lengths + lengths - 1,
      self._sizes.scheduler.page_size,
      self._num_pages,
      self._num_sink_pages,
    )
