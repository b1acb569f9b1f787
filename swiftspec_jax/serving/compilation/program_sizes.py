"""All sizes that the programs of an engine are compiled for."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.serving.scheduling.scheduler import SchedulerConfig
from swiftspec_jax.serving.target.flat_batch import FlatSizes

_SHORTEST_CONTEXT = 256
# Measured on a CPU with contexts of 256 and 1024: blocks of 8 and 16 tokens
# take about the same time, blocks of 1 three times as long (every token reads
# the pages of its row), and blocks of 64 twice (mostly padding).
_SMALLEST_BLOCK = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSizes:
  """Declared sizes, and which of them a step needs.

  Attributes:
    scheduler: rows, query tokens and lengths; pages.
    contexts: numbers of tokens under the attention, ascending. A step takes
      the smallest one that its longest row fits into.
    max_images: most images of a request, where the target reads images.
  """

  scheduler: SchedulerConfig
  contexts: tuple[int, ...] = ()
  max_images: int = 1

  def __post_init__(self):
    errors.check_fields(self, {'max_images': (self.max_images >= 1, '>= 1')})
    page_size = self.scheduler.page_size
    longest = _ceil(self.scheduler.max_context, page_size)
    contexts = self.contexts or _doubled(longest)
    contexts = tuple(sorted({_ceil(size, page_size) for size in contexts}))
    if contexts[0] < 1 or contexts[-1] < longest:
      raise errors.UserError(
        f'contexts must reach up to the {longest} tokens of the longest '
        f'request, got {self.contexts}'
      )
    object.__setattr__(self, 'contexts', contexts)

  @property
  def block_size(self) -> int:
    """Tokens of a block of attention: a row and its longest draft."""
    length = self.scheduler.buckets.max_length
    return max(_SMALLEST_BLOCK, 1 << length.bit_length())

  def plain(self, padded_rows: int, num_positions: int) -> FlatSizes:
    """Returns the sizes for rows that feed one token each."""
    return FlatSizes(
      num_rows=padded_rows,
      num_tokens=padded_rows,
      block_size=1,
      context=self.context_of(num_positions),
    )

  def mixed(
    self, padded_rows: int, padded_tokens: int, num_positions: int
  ) -> FlatSizes:
    """Returns the sizes for rows that feed any number of tokens."""
    return FlatSizes(
      num_rows=padded_rows,
      num_tokens=padded_tokens,
      block_size=self.block_size,
      context=self.context_of(num_positions),
    )

  def num_logits(self, sizes: FlatSizes) -> int:
    """Returns room for the tokens that can have a say in the output.

    These are declared sizes, too, so that there are few different verdicts.
    """
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

  def all_plain(self) -> Iterator[FlatSizes]:
    """Yields the sizes of every program for plain steps."""
    for rows, context in itertools.product(
      self.scheduler.buckets.rows, self.contexts
    ):
      yield self.plain(rows, context)

  def all_mixed(self) -> Iterator[FlatSizes]:
    """Yields the sizes of every program for other steps."""
    buckets = self.scheduler.buckets
    for fewer_rows, rows in itertools.pairwise((0, *buckets.rows)):
      for fewer, tokens in itertools.pairwise((0, *buckets.query_tokens)):
        # At least fewer_rows + 1 rows feed a token, and one of them more.
        if tokens > fewer_rows + 1:
          for context in self.contexts:
            # And at most what all rows have in this context.
            if rows * self.range_of(context)[1] > fewer:
              yield self.mixed(rows, tokens, context)


def _ceil(size: int, unit: int) -> int:
  return -(-size // unit) * unit


def _doubled(longest: int) -> tuple[int, ...]:
  sizes = [longest]
  size = _SHORTEST_CONTEXT
  while size < longest:
    sizes.append(size)
    size *= 2
  return tuple(sorted(sizes))
