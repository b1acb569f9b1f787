"""The sizes that the programs of a serving step are compiled for.

A step feeds a flat list of query tokens that belong to some rows: one token and
its draft for a row that decodes, a chunk of the prompt for a row that is being
filled. Both counts are padded to declared sizes, so nothing is compiled while
requests are served.
"""

import bisect
import dataclasses
import functools
import itertools

import numpy as np

from swiftspec_jax import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBuckets:
  """Declared sizes, all ascending.

  Attributes:
    rows: numbers of rows of a step.
    query_tokens: numbers of tokens that the target takes in a step, all rows
      together; the last one is the token budget.
    lengths: draft tokens of a row, 0 first. For a tree these are its nodes
      without the root.
    draft_steps: forwards of the draft for each of the lengths. None stands for
      a chain, which needs as many as it has tokens.
  """

  rows: tuple[int, ...]
  query_tokens: tuple[int, ...]
  lengths: tuple[int, ...] = (0,)
  draft_steps: tuple[int, ...] | None = None

  def __post_init__(self):
    if self.draft_steps is None:
      object.__setattr__(self, 'draft_steps', self.lengths)
    checks = {
      'rows': (_is_ascending(self.rows, 1), 'ascending, from 1 up'),
      'query_tokens': (
        _is_ascending(self.query_tokens, 1)
        and self.query_tokens[-1] >= self.rows[-1],
        f'ascending, up to at least the {self.rows[-1]} rows',
      ),
      'lengths': (
        _is_ascending(self.lengths, 0) and self.lengths[0] == 0,
        'ascending, and begin with 0',
      ),
      'draft_steps': (
        len(self.draft_steps) == len(self.lengths)
        and self.draft_steps[0] == 0
        and all(a <= b for a, b in itertools.pairwise(self.draft_steps)),
        f'0 and then not descending, one for each of lengths={self.lengths}',
      ),
    }
    errors.check_fields(self, checks)

  @classmethod
  def powers_of_two(
    cls, max_rows: int, max_query_tokens: int, max_length: int
  ) -> 'StepBuckets':
    """Returns buckets for chains, each size at most twice the one before.

    Between two powers of two of query tokens there is one more size.
    """
    doubled = [2**i for i in range(max_query_tokens.bit_length())]
    halves = [3 * 2**i for i in range(2, max_query_tokens.bit_length())]
    return cls(
      rows=_up_to([2**i for i in range(max_rows.bit_length())], max_rows),
      query_tokens=_up_to(sorted(doubled + halves), max_query_tokens),
      lengths=tuple(range(max_length + 1)),
    )

  @property
  def max_rows(self) -> int:
    return self.rows[-1]

  @property
  def max_query_tokens(self) -> int:
    return self.query_tokens[-1]

  @property
  def max_length(self) -> int:
    return self.lengths[-1]

  @functools.cached_property
  def query_token_array(self) -> np.ndarray:
    """i64 of `query_tokens`."""
    return np.array(self.query_tokens)

  def pad_rows(self, num_rows: int) -> int:
    """Returns the declared number of rows that holds some rows."""
    return self.rows[bisect.bisect_left(self.rows, num_rows)]

  def pad_query_tokens(self, num_query_tokens: int) -> int:
    """Returns the declared number of query tokens that holds some tokens."""
    index = bisect.bisect_left(self.query_tokens, num_query_tokens)
    return self.query_tokens[index]

  def computed_tokens(
    self, num_rows: int, num_query_tokens: np.ndarray | float
  ) -> np.ndarray:
    """Returns the tokens that the target computes, padding too.

    For rows that feed a token each there are programs without query tokens, and
    only the rows are padded.

    Args:
      num_rows: rows of a step.
      num_query_tokens: tokens that they feed, one number or one for each of
        several candidates.

    Returns:
      i64 in the shape of `num_query_tokens`.
    """
    declared = self.query_token_array
    return np.where(
      np.less_equal(num_query_tokens, num_rows),
      self.pad_rows(num_rows),
      declared[np.searchsorted(declared, num_query_tokens)],
    )

  def steps_of(self, length: int) -> int:
    """Returns the draft forwards for rows of up to `length` draft tokens."""
    return self.draft_steps[bisect.bisect_left(self.lengths, length)]


def _is_ascending(sizes: tuple[int, ...], least: int) -> bool:
  return (
    bool(sizes)
    and sizes[0] >= least
    and all(a < b for a, b in itertools.pairwise(sizes))
  )


def _up_to(sizes: list[int], largest: int) -> tuple[int, ...]:
  return (*(size for size in sizes if size < largest), largest)
