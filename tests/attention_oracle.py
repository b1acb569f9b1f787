"""What attention is, in plain Python and float64.

The oracle is a loop over the rows that a token sees. Tolerances:
float32 products and sums over up to 400 rows, and an exponential, keep six
digits; the oracle reads the same rounded bfloat16 inputs, so that what is left
there are the weights and the output, each rounded to 8 bits.
"""

import dataclasses

import numpy as np

TOLERANCES = {'float32': 2e-6, 'bfloat16': 2e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """As in the kernels' legend."""

  prefix_lengths: tuple[int, ...]
  num_kv_heads: int
  num_groups: int = 3
  head_dim: int = 64
  dtype: str = 'float32'
  window: int | None = None

  @property
  def num_heads(self):
    return self.num_kv_heads, self.num_groups

  @property
  def options(self):
    return {'scale': self.head_dim**-0.5, 'window': self.window}


def assert_close(got, want, dtype):
  """Within the tolerance of the dtype, absolute and relative."""
  got, tolerance = np.asarray(got, np.float32), TOLERANCES[dtype]
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def ancestor_mask(parents, tree_size):
  """Rows of the last tokens of a tree; parents come before children."""
  mask = np.eye(tree_size, dtype=bool)
  for node in range(1, tree_size):
    mask[node] |= mask[parents[node] % node]
  return mask


def oracle(
  queries, keys, values, lengths, masks, positions, scale, window, sinks=None
):
  """Plain Python over tokens and rows, in float64."""
  queries, keys, values = (
    np.asarray(x, np.float64) for x in (queries, keys, values)
  )
  lengths, masks, positions = map(np.asarray, (lengths, masks, positions))
  out = np.zeros(queries.shape)
  for b, t in np.ndindex(queries.shape[:2]):
    rows = [*range(lengths[b]), *(lengths[b] + np.flatnonzero(masks[b, t]))]
    if window is not None:
      rows = [row for row in rows if positions[b, t] - row < window]
    if not rows:
      continue
    for g, q in np.ndindex(queries.shape[2:4]):
      scores = keys[b, g, rows] @ queries[b, t, g, q] * scale
      sink = -np.inf if sinks is None else sinks[g, q]
      best = max(scores.max(), sink)
      weights = np.exp(scores - best)
      total = weights.sum() + np.exp(sink - best)
      out[b, t, g, q] = weights @ values[b, g, rows] / total
  return out
