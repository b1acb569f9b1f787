"""Times on a grid of sizes, fitted so that more work never takes less time.

Legend: F, S, V points of the three axes; n measurements.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.policies import cost_model

# Of the root mean square. A bound of R^2 would refuse times that hardly differ.
_MOST_ERROR = 0.25

# From sizes along the three axes, f64[n] each, to features f64[n, features],
# none of which falls when a size grows.
Features = Callable[[np.ndarray, np.ndarray, np.ndarray], Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CostTable:
  """Seconds by two declared sizes and the tokens in the cache.

  Attributes:
    first: i64[F] declared sizes, ascending; what lies between counts as the
      next one.
    second: i64[S] declared sizes, ascending, as `first`.
    kv_tokens: i64[V] ascending; between them times are interpolated.
    seconds: f64[F, S, V], not falling along any axis.
    kv_slopes: f64[F, S] seconds of a token past the last of `kv_tokens`.
  """

  first: np.ndarray
  second: np.ndarray
  kv_tokens: np.ndarray
  seconds: np.ndarray
  kv_slopes: np.ndarray

  def __call__(
    self, first: int, second: cost_model.Numbers, kv_tokens: float
  ) -> cost_model.Numbers:
    """Returns seconds, in the shape of `second`."""
    i = bisect.bisect_left(self.first, first)
    last = len(self.kv_tokens) - 1
    above = min(bisect.bisect_left(self.kv_tokens, kv_tokens), last)
    below = max(above - 1, 0)
    start, end = self.kv_tokens[below], self.kv_tokens[above]
    share = 0.0
    if start < kv_tokens:
      share = min((kv_tokens - start) / max(end - start, 1), 1.0)
    line = (1 - share) * self.seconds[i, :, below]
    line += share * self.seconds[i, :, above]
    if kv_tokens > self.kv_tokens[-1]:
      line += self.kv_slopes[i] * (kv_tokens - self.kv_tokens[-1])
    return line[np.searchsorted(self.second, second)]


def fit(
  name: str,
  points: np.ndarray,
  seconds: np.ndarray,
  axes: tuple[Sequence[int], Sequence[int], Sequence[int]],
  features: Features,
) -> CostTable:
  """Makes a table of measurements.

  A non-negative least-squares fit stands for the points that were not measured
  and says how times go on past the last one. Where the measurements do not
  contradict each other, the table has them exactly.

  Args:
    name: name of what was measured, for messages.
    points: f64[n, 3] sizes along the axes, each on the grid.
    seconds: f64[n]; of equal points the median counts.
    axes: the grid.
    features: features of the fit.

  Raises:
    UserError: there are too few measurements, or they do not grow with the
      sizes.
  """
  # Here, as it takes long to import and few programs need it.
  from scipy import optimize

  points, inverse = np.unique(points, axis=0, return_inverse=True)
  seconds = np.array(
    [np.median(seconds[inverse == i]) for i in range(len(points))]
  )
  matrix = _matrix(features, points)
  if len(points) < matrix.shape[1]:
    raise errors.UserError(
      f'{name} was measured at {len(points)} points, at least '
      f'{matrix.shape[1]} are needed'
    )
  coefficients, _ = optimize.nnls(matrix, seconds)
  arrays = [np.array(axis) for axis in axes]
  grid = np.stack(np.meshgrid(*arrays, indexing='ij'), axis=-1)
  fitted = _matrix(features, grid.reshape(-1, 3)) @ coefficients
  fitted = fitted.reshape(grid.shape[:3])
  measured = np.full(fitted.shape, np.nan)
  places = tuple(map(np.searchsorted, arrays, points.T))
  measured[places] = seconds
  whole = _completed(measured, fitted)
  # Values that fall along no axis, midway between the bounds.
  table = (_running_max(whole) + _running_min(whole)) / 2
  # Times need not follow the fit, such as those of one row and of two.
  error = np.linalg.norm(seconds - table[places])
  if error > _MOST_ERROR * np.linalg.norm(seconds):
    share = error / np.linalg.norm(seconds)
    raise errors.UserError(
      f'the times of {name} do not grow with the sizes: a table that does is '
      f'off by {share:.0%}, allowed are {_MOST_ERROR:.0%}; measure again on an '
      'idle machine'
    )
  ends = grid[:, :, -1].reshape(-1, 3)
  after = ends + np.array([0, 0, 1])
  slopes = _matrix(features, after) - _matrix(features, ends)
  return CostTable(
    first=arrays[0],
    second=arrays[1],
    kv_tokens=arrays[2],
    seconds=table,
    kv_slopes=(slopes @ coefficients).reshape(fitted.shape[:2]),
  )


def _matrix(features: Features, points: np.ndarray) -> np.ndarray:
  columns = features(*np.asarray(points, float).T)
  return np.stack(np.broadcast_arrays(*columns), axis=1)


def _completed(measured: np.ndarray, fitted: np.ndarray) -> np.ndarray:
  """Returns the measured times; the fit, kept between them, where none is."""
  is_missing = np.isnan(measured)
  floor = _running_max(np.where(is_missing, -np.inf, measured))
  ceiling = _running_min(np.where(is_missing, np.inf, measured))
  between = np.clip(fitted, floor, np.maximum(floor, ceiling))
  return np.where(is_missing, between, measured)


def _running_max(values: np.ndarray) -> np.ndarray:
  for axis in range(values.ndim):
    values = np.maximum.accumulate(values, axis=axis)
  return values


def _running_min(values: np.ndarray) -> np.ndarray:
  return -np.flip(_running_max(np.flip(-values)))
