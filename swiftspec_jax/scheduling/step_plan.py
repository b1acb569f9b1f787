"""What a step of the engine runs."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
  """What a step runs. The rows that decode come first, as in their view.

  Attributes:
    request_ids: i64[R].
    slots: i64[R].
    starts: i64[R] tokens of each row in the cache; the next ones are fed. Of
      rows with unread rounds it is what the host knows; the devices know more.
    num_query_tokens: i64[R] that each row feeds.
    lengths: i64[R] draft tokens among them.
    is_sampled: bool[R]: whether the row emits a token; not so while its prompt
      is not complete.
    num_ahead: i64[R] most tokens that unread rounds add to `starts`.
    num_decoding: number of rows that decode.
    shape: rows and query tokens of the whole step, of which `only` leaves some.
    padded_rows: declared size for the rows.
    padded_query_tokens: declared size for all query tokens.
  """

  request_ids: np.ndarray
  slots: np.ndarray
  starts: np.ndarray
  num_query_tokens: np.ndarray
  lengths: np.ndarray
  is_sampled: np.ndarray
  num_ahead: np.ndarray
  num_decoding: int
  shape: tuple[int, int]
  padded_rows: int
  padded_query_tokens: int

  def only(self, is_kept: np.ndarray) -> 'StepPlan':
    """Returns what the step runs for rows bool[R]."""
    if is_kept.all():
      return self
    values = vars(self) | {
      name: value[is_kept]
      for name, value in vars(self).items()
      if isinstance(value, np.ndarray)
    }
    num_decoding = int(np.count_nonzero(is_kept[: self.num_decoding]))
    return StepPlan(**values | {'num_decoding': num_decoding})

  @property
  def most_emitted(self) -> np.ndarray:
    """i64[R], the most tokens that each row emits."""
    return (self.lengths + 1) * self.is_sampled

  @property
  def is_decoding(self) -> bool:
    """Whether no row feeds a part of its prompt."""
    return self.num_decoding == len(self.slots)

  @property
  def is_plain(self) -> bool:
    """Whether each row feeds one token, for which there are programs."""
    num_rows, num_tokens = self.shape
    return num_tokens == num_rows

  @property
  def num_computed_tokens(self) -> int:
    """Tokens that the target computes, padding too."""
    return self.padded_rows if self.is_plain else self.padded_query_tokens

  @property
  def kv_tokens(self) -> int:
    """Tokens in the cache of all rows together."""
    return int(self.starts.sum())
