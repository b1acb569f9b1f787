"""Compares two runs of the same work, with intervals of confidence."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.output.result_folder import Sample

_LEAST = 5  # samples of a group; of fewer an interval would be too narrow
_CONFIDENCE = 0.95
_NUM_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
  """The speed of a group in the second run over that in the first.

  Attributes:
    group: the mode, policy or kernel.
    num_samples: samples that both runs have.
    ratio: the ratio of the speeds, total work over total seconds.
    low: the lower end of the interval, None with too few samples.
    high: upper end of the interval.
  """

  group: str
  num_samples: int
  ratio: float
  low: float | None
  high: float | None


def compare(first: Sequence[Sample], second: Sequence[Sample]) -> list[Ratio]:
  """Returns a ratio for each group that both runs have.

  Intervals are of 95 %, by the bootstrap over samples that both runs have: the
  same prompts, seeds or shapes.
  """
  old = {(sample.group, sample.key): sample for sample in first}
  pairs: dict[str, list[tuple[Sample, Sample]]] = {}
  for sample in second:
    if (sample.group, sample.key) in old:
      pair = old[sample.group, sample.key], sample
      pairs.setdefault(sample.group, []).append(pair)
  return [_ratio(group, found) for group, found in pairs.items()]


def _ratio(group: str, pairs: Sequence[tuple[Sample, Sample]]) -> Ratio:
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
  return Ratio(
    group=group,
    num_samples=len(pairs),
    ratio=float(_ratio_of_speeds(*columns)),
    low=low,
    high=high,
  )


def _ratio_of_speeds(amount, seconds, new_amount, new_seconds, axis=-1):
  old = amount.sum(axis) / seconds.sum(axis)
  return new_amount.sum(axis) / new_seconds.sum(axis) / old
