"""Sharing draft tokens among rows: the most useful ones first.

The gain of a token is the probability that it is accepted, all tokens before it
included. Along a row gains never rise, so the best tokens of the batch are the
first ones of each row.

Legend: B rows, K longest draft.
"""

import numpy as np

_KEY_RANGE = 65535  # 16 bits: NumPy sorts such integers by radix, stably


def allocate(gains: np.ndarray, num_tokens: int) -> np.ndarray:
  """Returns how many draft tokens each row gets, i64[B].

  Args:
    gains: f64[K, B] in [0, 1], not rising along K; 0 for what must not be
      drafted.
    num_tokens: number of draft tokens for all rows together. Gains are compared
      in 16 bits. Of equal ones the earlier position comes first, then the
      earlier row.
  """
  num_rows = gains.shape[1]
  if num_tokens >= np.count_nonzero(gains):
    return np.count_nonzero(gains, axis=0)
  # Rounded up: a small gain comes before none.
  keys = _KEY_RANGE - np.ceil(gains.ravel() * _KEY_RANGE).astype(np.uint16)
  best = np.argsort(keys, kind='stable')[:num_tokens]
  return np.bincount(best % num_rows, minlength=num_rows)
