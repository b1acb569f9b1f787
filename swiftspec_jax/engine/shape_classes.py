"""Sizes to compile for, chosen from the steps of a load.

A step of `r` rows that feeds `n` tokens takes a program for at least as many of
both, and what is more than it needs is padding. A step of one token a row has
programs of its own, whose tokens are their rows. So the sizes that a number of
programs is best spent on depend on the load (XY-Serve, arXiv 2412.18106, has
such classes of shapes; the search is ours).

Legend: n sizes, S steps of different shapes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets

# Rows and query tokens of a step.
Shape = tuple[int, int]


def choose(
  shapes: Mapping[Shape, int], buckets: StepBuckets, most: int
) -> StepBuckets:
  """Returns buckets with the sizes of rows and query tokens that pad least.

  They have the least sum of all computed tokens (`num_computed`), to which each
  declared row of a step of several tokens a row adds one: it has at least a
  block of attention.

  Args:
    shapes: number of steps of each shape.
    buckets: buckets to take everything else from, the largest sizes too.
    most: most programs, see `num_programs`.

  Raises:
    UserError: there are no steps, some do not fit into the largest sizes, or
      not even one size of each fits into the number of programs.
  """
  _check(shapes, buckets)
  if most < 2:
    raise errors.UserError(
      f'{most} programs are too few: at least 2 are needed, one for steps of a '
      'token a row and one for others'
    )
  rows, tokens, counts = _arrays(shapes)
  is_mixed = tokens > rows
  by_rows = best_classes(
    np.append(rows, buckets.max_rows), np.append(counts, 0), most // 2
  )
  by_tokens = best_classes(
    np.append(tokens[is_mixed], buckets.max_query_tokens),
    np.append(counts[is_mixed], 0),
    most - 1,
  )
  candidates = (
    (found, by_tokens[min(most // len(found) - 1, len(by_tokens)) - 1])
    for found in by_rows
  )
  chosen = min(
    candidates,
    key=lambda pair: (
      counts @ _padded(rows, pair[0])
      + (counts * is_mixed) @ _padded(tokens, pair[1])
    ),
  )
  return dataclasses.replace(buckets, rows=chosen[0], query_tokens=chosen[1])


def best_classes(
  sizes: np.ndarray, counts: np.ndarray, most: int
) -> list[tuple[int, ...]]:
  """Returns the classes with the least sum of the classes that sizes take.

  A size takes the smallest class that is not smaller. Dynamic programming over
  the ascending sizes, of which the last class takes the largest ones.

  Args:
    sizes: i64[n], at least 1.
    counts: i64[n] how often each occurs.
    most: most classes, at least 1.

  Returns:
    The best single class, the best two, and so on; fewer than `most` if there
    are fewer sizes.
  """
  ends, inverse = np.unique(sizes, return_inverse=True)
  weights = np.bincount(inverse, weights=counts)
  before = np.concatenate([[0], np.cumsum(weights)])
  # Of a class that ends at j and takes the sizes from i on.
  sums = ends[None] * (before[None, 1:] - before[:-1, None])
  sums[np.tri(len(ends), k=-1, dtype=bool)] = np.inf
  least, starts = sums[0], []
  found = [(int(ends[-1]),)]
  for _ in range(1, min(most, len(ends))):
    totals = np.concatenate([[np.inf], least[:-1]])[:, None] + sums
    starts.append(totals.argmin(axis=0))
    least = totals.min(axis=0)
    classes, end = [], len(ends) - 1
    for start in reversed(starts):
      classes.append(int(ends[end]))
      end = int(start[end]) - 1
    found.append((int(ends[end]), *reversed(classes)))
  return found


def num_programs(buckets: StepBuckets) -> int:
  """Returns the most programs of the target that a context can have.

  There is one for each number of rows, and for each pair of rows and query
  tokens; pairs that no step can have are left out when they are compiled.
  """
  return len(buckets.rows) * (1 + len(buckets.query_tokens))


def num_computed(shapes: Mapping[Shape, int], buckets: StepBuckets) -> int:
  """Returns the tokens that the target computes in all steps, padding too.

  Raises:
    UserError: there are no steps, or some do not fit.
  """
  _check(shapes, buckets)
  rows, tokens, counts = _arrays(shapes)
  computed = np.where(
    tokens > rows,
    _padded(tokens, buckets.query_tokens),
    _padded(rows, buckets.rows),
  )
  return int(counts @ computed)


def padded_share(shapes: Mapping[Shape, int], buckets: StepBuckets) -> float:
  """Returns which share of the computed tokens is padding.

  Raises:
    UserError: there are no steps, or some do not fit.
  """
  _, tokens, counts = _arrays(shapes)
  return 1 - int(counts @ tokens) / num_computed(shapes, buckets)


def _check(shapes: Mapping[Shape, int], buckets: StepBuckets) -> None:
  if not shapes:
    raise errors.UserError('there are no steps to choose sizes from')
  for rows, tokens in shapes:
    if not 1 <= rows <= tokens:
      raise errors.UserError(
        f'a step of {rows} rows and {tokens} tokens is none: each row feeds at '
        'least one token'
      )
  sizes = 'rows', 'query_tokens'
  limits = buckets.max_rows, buckets.max_query_tokens
  for name, most, largest in zip(
    sizes, limits, map(max, zip(*shapes, strict=True)), strict=True
  ):
    if largest > most:
      raise errors.UserError(
        f'a step of {largest} {name} does not fit into the largest size, {most}'
      )


def _arrays(
  shapes: Mapping[Shape, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns rows, tokens and numbers of steps, i64[S] each."""
  rows, tokens = np.array([*shapes], np.int64).reshape(-1, 2).T
  return rows, tokens, np.array([*shapes.values()], np.int64)


def _padded(sizes: np.ndarray, classes: Sequence[int]) -> np.ndarray:
  return np.array(classes)[np.searchsorted(classes, sizes)]
