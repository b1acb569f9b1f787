"""Compares two runs of the same work, with intervals of confidence."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.output.result_folder import Row, Sample

_LEAST = 5  # samples of a group; of fewer an interval would be too narrow
_CONFIDENCE = 0.95
_NUM_RESAMPLES = 2000


def compare(first: Sequence[Sample], second: Sequence[Sample]) -> list[Row]:
  """Returns a row of the page for each group that both runs have.

  It has the `speed ratio`, total work over total seconds in the second run over
  that in the first, and an interval of 95 %, None with too few samples. That is
  by the bootstrap over samples that both runs have: the same prompts, seeds or
  shapes.
  """
  old = {(sample.group, sample.key): sample for sample in first}
  pairs: dict[str, list[tuple[Sample, Sample]]] = {}
  for sample in second:
    if (sample.group, sample.key) in old:
      pair = old[sample.group, sample.key], sample
      pairs.setdefault(sample.group, []).append(pair)
  return [_ratio(group, found) for group, found in pairs.items()]


def _ratio(group: str, pairs: Sequence[tuple[Sample, Sample]]) -> Row:
  columns = [
    np.array([getattr(pair[i], name) for pair in pairs], float)
    for i in range(2)
    for name in ('amount', 'seconds')
  ]
  low = high = None
  if len(pairs) >= _LEAST:
    interval = stats.bootstrap(
      columns,
      _ratio_of_speeds,
      paired=True,
      vectorized=True,
      n_resamples=_NUM_RESAMPLES,
      confidence_level=_CONFIDENCE,
      method='percentile',
      rng=np.random.default_rng(0),
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
  return {
    'what': group,
    'samples': len(pairs),
    'speed ratio': float(_ratio_of_speeds(*columns)),
    'from (95 %)': low,
    'to': high,
  }


def _ratio_of_speeds(amount, seconds, new_amount, new_seconds, axis=-1):
  old = amount.sum(axis) / seconds.sum(axis)
  return new_amount.sum(axis) / new_seconds.sum(axis) / old
