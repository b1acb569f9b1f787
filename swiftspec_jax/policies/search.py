"""The length and the number of draft tokens with the highest goodput.

Goodput is the expected number of tokens that a step emits, over its predicted
seconds (SmartSpec, arXiv 2406.14066). All declared lengths are compared, each
with all declared sizes of the target's step: with padding, costs are steps, and
the search for a single peak would stop on the wrong one.

Legend: B rows, K longest draft, C candidate lengths, E candidate sizes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from swiftspec_jax import cost_model, policies

# Gains are counted in classes, four for each halving.
_CLASSES_PER_OCTAVE = 4
_NUM_CLASSES = 64
_LEAST_GAIN = 2.0 ** (-(_NUM_CLASSES - 1) / _CLASSES_PER_OCTAVE)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
  """The best of every candidate length.

  Attributes:
    goodput: f64[C] tokens per second.
    num_tokens: f64[C] draft tokens of all rows together.
    expected_tokens: f64[C] that the step emits for the rows.
    expected_seconds: f64[C] of the step.
  """

  goodput: np.ndarray
  num_tokens: np.ndarray
  expected_tokens: np.ndarray
  expected_seconds: np.ndarray


def score(
  view: policies.StepView,
  gains: np.ndarray,
  costs: cost_model.CostModel,
  *,
  lengths: Sequence[int],
  draft_steps: Sequence[int],
  coverage: float = 1.0,
) -> Scores:
  """Scores longest drafts, each with the best number of tokens.

  Args:
    view: the batch.
    gains: f64[K, B], 0 for what must not be drafted.
    costs: of a step.
    lengths: C longest drafts.
    draft_steps: forwards that the draft needs for each.
    coverage: share of the rows that will have a draft.
  """
  num_fixed = view.num_rows + view.num_prefill_tokens
  counts, sums = _curves(gains, lengths)
  sizes = view.buckets.query_token_array
  first = np.searchsorted(sizes, num_fixed)
  last = np.searchsorted(sizes, num_fixed + coverage * counts[-1, -1])
  sizes = sizes[first : last + 1]
  room = np.minimum(sizes - num_fixed, view.max_draft_tokens) / coverage
  num_tokens = np.minimum(room, counts[:, -1:])
  expected = np.empty(num_tokens.shape)
  for i in range(len(lengths)):
    expected[i] = np.interp(room, counts[i], sums[i])
  expected *= coverage
  expected += view.num_rows
  fed = np.searchsorted(sizes, num_fixed + coverage * num_tokens - 1e-6)
  seconds = costs.predict(
    view.buckets.pad_rows(max(view.num_rows, 1)),
    sizes[fed],
    int(view.kv_lengths.sum()) + view.prefill_kv_tokens,
    np.asarray(draft_steps)[:, None],
  ).total
  goodput = expected / seconds
  best = goodput.argmax(axis=1)
  chosen = np.arange(len(lengths)), best
  return Scores(
    goodput=goodput[chosen],
    num_tokens=num_tokens[chosen],
    expected_tokens=expected[chosen],
    expected_seconds=seconds[chosen],
  )


def _curves(
  gains: np.ndarray, lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns how the sum of gains grows with the number of tokens.

  Instead of sorting the tokens for every length, tokens of about equal gain
  are counted together; between these points the curve is a line.

  Returns:
    Numbers of tokens and the sums of the gains of the best so many, both
    f64[C, classes + 1], for drafts of each of the lengths.
  """
  num_positions = len(gains)
  octaves = np.log2(np.maximum(gains, _LEAST_GAIN))
  classes = (octaves * -_CLASSES_PER_OCTAVE).astype(np.int64)
  classes += np.arange(num_positions)[:, None] * _NUM_CLASSES
  size = num_positions * _NUM_CLASSES
  shape = (num_positions, _NUM_CLASSES)
  found = np.zeros((2, num_positions + 1, _NUM_CLASSES + 1))
  inner = found[:, 1:, 1:]
  classes = classes.ravel()
  inner[0] = np.bincount(classes, minlength=size).reshape(shape)
  weighted = np.bincount(classes, weights=gains.ravel(), minlength=size)
  inner[1] = weighted.reshape(shape)
  # What is not worth counting, or must not be drafted.
  inner[:, :, -1] = 0
  counts, sums = found.cumsum(axis=1)[:, list(lengths)].cumsum(axis=2)
  return counts, sums
