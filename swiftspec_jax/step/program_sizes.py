"""All sizes that the programs of an engine are compiled for."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from swiftspec_jax import errors
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step import buckets
from swiftspec_jax.step.ragged_batch import StepSizes

# Measured on a CPU with contexts of 256 and 1024: blocks of 8 and 16 tokens
# take about the same time, blocks of 1 three times as long (every token reads
# the pages of its row), and blocks of 64 twice (mostly padding).
_SMALLEST_BLOCK = 8
_LEAST_TOKENS = 16


def least_tokens(mesh: Mesh, num_rows: int) -> int:
  """Returns the fewest tokens of a step, to which smaller ones are padded.

  XLA sums in another order in programs of other shapes, and then bfloat16 has
  other bits. So the steps of one row have one shape on GPUs and TPUs, where
  the time of few tokens is that of reading the weights. Kernels of CPUs give a
  token the same bits in any step.

  Args:
    mesh: devices of the target.
    num_rows: rows that decode together.
  """
  is_padded = num_rows == 1 and mesh.devices.flat[0].platform != 'cpu'
  return _LEAST_TOKENS if is_padded else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSizes:
  """Declared sizes, and which of them a step needs.

  Attributes:
    scheduler: rows, query tokens and lengths; pages.
    contexts: numbers of tokens under the attention, ascending. A step takes
      the smallest one that its longest row fits into.
    has_rows: whether each slot has a row of the target's cache to itself. Then
      nothing is looked up in a page table, and every step computes all slots:
      for few of them. `of_rows` makes such sizes.
    least_tokens: fewest tokens of a step, padding included.
  """

  scheduler: SchedulerConfig
  contexts: tuple[int, ...] = ()
  has_rows: bool = False
  least_tokens: int = 1

  @classmethod
  def of_rows(
    cls, buckets: StepBuckets, max_context: int, least_tokens: int = 1
  ) -> 'ProgramSizes':
    """Returns sizes for slots with rows, each a page for the longest text.

    Args:
      buckets: rows, query tokens and lengths. Steps are compiled for all slots
        alone; those of `rows[-1]` tokens and of as many for each longest draft
        need no tokens out of order.
      max_context: most tokens of a request, prompt and output together.
      least_tokens: fewest tokens of a step, padding included.
    """
    query_tokens = {max(size, least_tokens) for size in buckets.query_tokens}
    return cls(
      scheduler=SchedulerConfig(
        buckets=dataclasses.replace(
          buckets,
          rows=buckets.rows[-1:],
          query_tokens=tuple(sorted(query_tokens)),
        ),
        num_pages=buckets.max_rows,
        max_context=max_context,
        page_size=max_context,
        shares_prefixes=False,
      ),
      contexts=(max_context,),
      has_rows=True,
      least_tokens=least_tokens,
    )

  def __post_init__(self):
    config = self.scheduler
    can_have_rows = (
      config.page_size >= config.max_context
      and config.num_pages == config.buckets.max_rows
      and len(config.buckets.rows) == 1
    )
    checks = {
      'has_rows': (
        can_have_rows or not self.has_rows,
        'False, unless the sizes are like those of `of_rows`',
      ),
    }
    errors.check_fields(self, checks)
    page_size = config.page_size
    longest = _ceil(config.max_context, page_size)
    contexts = self.contexts or _doubled(longest)
    contexts = tuple(sorted({_ceil(size, page_size) for size in contexts}))
    if contexts[0] < 1 or contexts[-1] < longest:
      raise errors.UserError(
        f'contexts must reach up to the {longest} tokens of the longest '
        f'request, got {self.contexts}'
      )
    object.__setattr__(self, 'contexts', contexts)

  @property
  def row_capacity(self) -> int:
    """Tokens of a slot's row: the longest text, and what a step writes."""
    buckets = self.scheduler.buckets
    widest = max(map(self.block_size, buckets.query_tokens))
    return self.scheduler.max_context + widest

  def block_size(self, num_tokens: int) -> int:
    """Returns the tokens of a block of attention, in steps of `num_tokens`.

    A row and its longest draft. Where slots have rows, it is a slot's part, or
    all tokens if they can be chunks.
    """
    buckets = self.scheduler.buckets
    if not self.has_rows:
      return max(_SMALLEST_BLOCK, 1 << buckets.max_length.bit_length())
    if self._is_for_drafts(num_tokens):
      return -(-num_tokens // buckets.max_rows)
    return num_tokens

  def _is_for_drafts(self, num_tokens: int) -> bool:
    """Whether slots have rows, and steps of this size feed no prompts."""
    buckets = self.scheduler.buckets
    most_drafted = buckets.max_rows * (buckets.max_length + 1)
    return (
      self.has_rows
      and num_tokens <= max(most_drafted, self.least_tokens)
      and num_tokens < buckets.max_query_tokens
    )

  def is_for_prompts(self, sizes: StepSizes) -> bool:
    """Whether steps have more tokens than all rows and their longest drafts."""
    buckets = self.scheduler.buckets
    return sizes.num_tokens > buckets.max_rows * (buckets.max_length + 1)

  def pad_query_tokens(
    self, num_tokens: np.ndarray, *, has_prompts: bool
  ) -> int:
    """Returns the declared number of query tokens for rows of some tokens.

    Args:
      num_tokens: i64[r] of each row.
      has_prompts: whether some feed a part of a prompt.
    """
    total, most = num_tokens.sum(), num_tokens.max()
    return next(
      size
      for size in self.scheduler.buckets.query_tokens
      if size >= total
      and (not self.has_rows or self.block_size(size) >= most)
      and not (has_prompts and self._is_for_drafts(size))
    )

  def plain(self, padded_rows: int, num_positions: int) -> StepSizes:
    """Returns the sizes for rows that feed one token each."""
    if padded_rows < self.least_tokens:
      return self.mixed(padded_rows, padded_rows, num_positions)
    return StepSizes(
      num_rows=padded_rows,
      num_tokens=padded_rows,
      block_size=1,
      context=self.context_of(num_positions),
      has_drafts=False,
    )

  def mixed(
    self, padded_rows: int, padded_tokens: int, num_positions: int
  ) -> StepSizes:
    """Returns the sizes for rows that feed any number of tokens."""
    padded_tokens = max(padded_tokens, self.least_tokens)
    is_for_drafts = self._is_for_drafts(padded_tokens)
    # A single slot with a row does not decode while it is being filled.
    is_alone = self.has_rows and self.scheduler.buckets.max_rows == 1
    return StepSizes(
      num_rows=padded_rows,
      num_tokens=padded_tokens,
      block_size=self.block_size(padded_tokens),
      context=self.context_of(num_positions),
      has_draft_blocks=is_for_drafts,
      has_drafts=is_for_drafts or not is_alone,
    )

  def num_logits(self, sizes: StepSizes) -> int:
    """Returns room for the tokens that can have a say in the output.

    These are declared sizes, too, so that there are few different verdicts.
    """
    if not sizes.has_drafts:
      return sizes.num_rows
    buckets = self.scheduler.buckets
    most = sizes.num_rows * (buckets.max_length + 1)
    if most >= sizes.num_tokens:
      return sizes.num_tokens
    return buckets.pad_query_tokens(most)

  def context_of(self, num_positions: int) -> int:
    """Returns the declared context for rows of some tokens."""
    return self.contexts[bisect.bisect_left(self.contexts, num_positions)]

  def range_of(self, context: int) -> tuple[int, int]:
    """Returns the fewest and the most positions that take a context."""
    shorter = bisect.bisect_left(self.contexts, context) - 1
    fewest = self.contexts[shorter] + 1 if shorter >= 0 else 1
    return fewest, min(context, self.scheduler.max_context)

  def made_up_pages(self) -> np.ndarray:
    """Returns a page table i32[rows, pages] for steps without requests.

    Rows have pages of their own while there are enough: a step that reads
    one page again and again is faster than a real one.
    """
    config = self.scheduler
    shape = config.buckets.max_rows, self.contexts[-1] // config.page_size
    pages = np.arange(math.prod(shape), dtype=np.int32) % config.num_pages
    return pages.reshape(shape)

  def all_plain(self) -> Iterator[StepSizes]:
    """Yields the sizes of every program for plain steps."""
    for rows, context in itertools.product(
      self.scheduler.buckets.rows, self.contexts
    ):
      yield self.plain(rows, context)

  def all_mixed(self) -> Iterator[StepSizes]:
    """Yields the sizes of every program for other steps."""
    buckets = self.scheduler.buckets
    for fewer_rows, rows in itertools.pairwise((0, *buckets.rows)):
      for fewer, tokens in itertools.pairwise((0, *buckets.query_tokens)):
        # At least fewer_rows + 1 rows feed a token, and one of them more.
        if tokens > fewer_rows + 1 and self.block_size(tokens) > 1:
          for context in self.contexts:
            # And at most what all rows have in this context.
            if rows * self.range_of(context)[1] > fewer:
              yield self.mixed(rows, tokens, context)


def _ceil(size: int, unit: int) -> int:
  return -(-size // unit) * unit


def _doubled(longest: int) -> tuple[int, ...]:
  sizes = [longest]
  size = buckets.SMALLEST
  while size < longest:
    sizes.append(size)
    size *= 2
  return tuple(sorted(sizes))
