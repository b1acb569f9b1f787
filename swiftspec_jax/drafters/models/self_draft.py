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
import operator

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafters.models.draft_chain import ChainDrafter
from swiftspec_jax.drafters.models.draft_forward import DraftRows, feed
from swiftspec_jax.drafters.models.draft_prefill import DraftPrefill
from swiftspec_jax.drafters.models.model_drafter import Unread
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.models.cache import paged
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes, padded
from swiftspec_jax.step.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfDraft(DraftSpec):
  """Drafter of an engine.

  Attributes:
    num_sink_tokens: first tokens of a row that a draft sees, in whole pages.
    window: latest tokens that it sees at least.
  """

  needs_pages = True

  num_sink_tokens: int = 16
  window: int = 496

  def __post_init__(self):
    checks = {
      'num_sink_tokens': (self.num_sink_tokens >= 0, '0 or more'),
      'window': (self.window >= 1, 'at least 1'),
    }
    errors.check_fields(self, checks)

  def num_forwards(self, length: int) -> int:
    return length

  def model_for(self, target: Model) -> Model:
    return target

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


class SelfDrafter(ChainDrafter):
  """Drafts over pages of the target, so no text is ever late."""

  _first_program = staticmethod(last_logits)

  def __init__(self, draft: SelfDraft, sizes: ProgramSizes, target: Target):
    """Allocates nothing."""
    self._draft = draft
    self._model = target.model
    self._sizes = sizes
    self._target = target
    self._argument = target.argument
    # It reads nothing but the last known tokens.
    self._draft_prefill = DraftPrefill(sizes.scheduler.buckets, None)
    self._call = operator.call
    self._warm_rows: set[int] = set()
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

  def _rows(
    self, sizes: StepSizes, unread: Unread, lengths: np.ndarray
  ) -> DraftRows:
    page_table, num_skipped = sparse_pages(
      unread.page_table,
      unread.ends + lengths - 2,  # room for what a draft writes
      self._sizes.scheduler.page_size,
      self._num_pages,
      self._num_sink_pages,
    )
    steps = np.arange(self._num_forwards, dtype=np.int32)[None]
    pad = functools.partial(padded, size=sizes.num_rows)
    return DraftRows(
      slots=pad(unread.slots),
      last=pad(np.arange(len(lengths))),
      positions=pad(unread.ends)[:, None] + steps,
      lengths=pad(lengths),
      page_table=pad(page_table),
      num_skipped=pad(num_skipped),
      texts=None,
    )

  def _fed(self, sizes: StepSizes, unread: Unread) -> tuple[jax.Array]:
    last = unread.texts.token_ids[unread.slots, unread.ends - 1]
    return (self._argument(padded(last, sizes.num_rows)),)

  def warm_up(self, flat: StepSizes) -> None:
    # Neither tokens nor context make a difference.
    if flat.num_rows not in self._warm_rows:
      self._warm_rows.add(flat.num_rows)
      super().warm_up(flat)

  def trial_prefill(self, num_rows: int, num_known: int) -> None:
    pass  # nothing is ever late
