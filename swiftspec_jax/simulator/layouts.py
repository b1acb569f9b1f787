"""In which forwards of the target the tokens of a step are computed.

The engine computes them as one flat list. Other systems pad: each row of a
batch to the longest one.
"""

import dataclasses
from collections.abc import Callable

from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSizes:
  """What a forward computes.

  Attributes:
    num_rows: declared size.
    num_tokens: tokens of all rows, padding too.
    kv_tokens: tokens in the cache of its rows together.
  """

  num_rows: int
  num_tokens: int
  kv_tokens: int


# From a step and the declared sizes; drafts are verified in the first forward.
Layout = Callable[[StepPlan, StepBuckets], list[ForwardSizes]]


def flat(step: StepPlan, buckets: StepBuckets) -> list[ForwardSizes]:
  """Returns one forward over a flat list, as the engine runs it.

  A step of a token a row has as many tokens as padded rows.
  """
  del buckets
  return [
    ForwardSizes(
      num_rows=step.padded_rows,
      num_tokens=step.num_computed_tokens,
      kv_tokens=step.kv_tokens,
    )
  ]


def one_batch(step: StepPlan, buckets: StepBuckets) -> list[ForwardSizes]:
  """Returns one forward with all rows padded to the longest."""
  return [_batch(step, slice(None), buckets)]


def by_stage(step: StepPlan, buckets: StepBuckets) -> list[ForwardSizes]:
  """Returns a forward of the rows that decode, and one for each prompt."""
  first = step.num_decoding
  stages = [slice(first)] if first else []
  stages += [slice(i, i + 1) for i in range(first, len(step.slots))]
  return [_batch(step, rows, buckets) for rows in stages]


def _batch(step: StepPlan, rows: slice, buckets: StepBuckets) -> ForwardSizes:
  """Returns declared rows times the declared size for the longest."""
  num_tokens = step.num_query_tokens[rows]
  num_rows = buckets.pad_rows(len(num_tokens))
  return ForwardSizes(
    num_rows=num_rows,
    num_tokens=num_rows * buckets.pad_query_tokens(int(num_tokens.max())),
    kv_tokens=int(step.starts[rows].sum()),
  )
