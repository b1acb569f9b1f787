"""Costs that are learned from the steps themselves, without a profile."""

import bisect
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies import cost_model
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets

_NUM_RECENT = 11  # steps of a size, whose median counts
_HALF_LIFE = 512  # steps after which what was seen of a size counts half
_RIDGE = 0.01  # of what a size adds: what was never seen is taken to be free
# Of a draft that takes time; its own time is not known apart from the step's.
_SOME_SECONDS = 1e-9
_FIT_EVERY = 32  # steps, as it takes some 0.5 ms
# Steps between tries, each of which may take twice two steps; 4, 8, ... at
# first.
_TRY_EVERY = 256
_GOLDEN = 0.618  # steps of this share of a circle soon come near every place
# Kinds of steps: those of a draft model with nothing to verify, and those with
# drafts of a model or of lookups. A lookup that finds nothing is a plain step.
_PLAIN, _UNVERIFIED, _VERIFIED, _LOOKED_UP = range(4)


class LiveCosts:
  """Seconds of whole steps by their declared sizes.

  A sum of nonnegative terms in the sizes, fitted to the sizes that were seen.
  Of a size that was seen lately, the median of its own times counts more. What
  is not tried is not known, so `due` names lengths to try.

  The time of a step is not divided among its parts. Nothing is known of the
  time in which a draft model reads late tokens; steps with such tokens are
  not counted.
  """

  def __init__(self, buckets: StepBuckets, *, drafts_by_model: bool):
    """Starts without knowledge.

    Args:
      buckets: declared sizes of the engine.
      drafts_by_model: whether drafts take time, other than lookups.
    """
    # It takes long: not with this module, nor in a step that is measured.
    threading.Thread(target=_import_nnls, daemon=True).start()
    self._buckets = buckets
    self._drafts_by_model = drafts_by_model
    self._draft_steps = np.unique(buckets.draft_steps)
    sizes = (buckets.rows, buckets.query_tokens, self._draft_steps)
    shape = (4, *map(len, sizes))
    # All by kind, rows, query tokens and draft steps; NaN: not seen.
    self._recent = np.full((*shape, _NUM_RECENT), np.nan)
    self._counts = np.zeros(shape, np.int64)
    self._last_seen = np.zeros(shape, np.int64)
    self._features = _features(*sizes)
    self._believed = np.ones(shape)
    self._num_tries = self._next_try = 0
    self._gap = 2  # steps to the next try, which doubles
    self._stride = _stride(len(buckets.lengths))

  def predict(
    self,
    num_rows: int,
    num_query_tokens: cost_model.Numbers,
    kv_tokens: float,
    num_draft_steps: cost_model.Numbers,
    *,
    finds_drafts: bool | np.ndarray = True,
    prefills_draft: bool | np.ndarray = False,
    by_model: bool = True,
  ) -> cost_model.StepSeconds:
    """See `CostModel.predict`; `by_model` is False for lookups alone."""
    del kv_tokens, prefills_draft  # what was seen lately had about the same
    by_model = by_model and self._drafts_by_model
    drafts = np.greater(num_draft_steps, 0)
    found, nothing = (
      (_VERIFIED, _UNVERIFIED) if by_model else (_LOOKED_UP, _PLAIN)
    )
    kinds = np.where(drafts, np.where(finds_drafts, found, nothing), _PLAIN)
    num_steps = np.where(drafts & by_model, num_draft_steps, 0)
    seconds = self._believed[
      kinds,
      bisect.bisect_left(self._buckets.rows, num_rows),
      np.searchsorted(self._buckets.query_token_array, num_query_tokens),
      np.searchsorted(self._draft_steps, num_steps),
    ]
    draft = np.where(drafts & by_model, _SOME_SECONDS, 0.0)
    return cost_model.StepSeconds(
      draft=draft, target=seconds - draft, overhead=0.0
    )

  def is_due(self, view: policies.StepView) -> bool:
    """Returns whether the step should try a length.

    None is due in a step that would tell nothing: without rows to draft for, or
    whose time does not count.
    """
    is_late = self._drafts_by_model and view.num_unread_tokens > 0
    return view.step >= self._next_try and view.num_rows > 0 and not is_late

  def due(self, view: policies.StepView) -> int | None:
    """Returns the index of a declared length that the step should try."""
    if not self.is_due(view):
      return None
    # Each is tried in two steps, as one alone does not count.
    place, is_second = divmod(self._num_tries, 2)
    self._num_tries += 1
    if is_second:
      self._gap = min(2 * self._gap, _TRY_EVERY)
    self._next_try = view.step + (self._gap if is_second else 1)
    # Lengths that are far apart tell most of those between them. The second one
    # is 0: trees may take as many forwards whatever their length, which tells
    # nothing of plain steps.
    return (1 - place) * self._stride % len(self._buckets.lengths)

  def observe(self, outcome: policies.Outcome) -> None:
    """Takes the time of a step."""
    if outcome.prefills_draft:
      return
    view, buckets = outcome.view, self._buckets
    longest = int(outcome.plan.lengths.max(initial=0))
    num_drafts = outcome.num_fed
    if num_drafts is None:
      num_drafts = int(outcome.lengths.sum())
    kind, num_steps = _PLAIN, 0
    if longest and self._drafts_by_model and not outcome.plan.is_lookup:
      kind = _VERIFIED if num_drafts else _UNVERIFIED
      num_steps = buckets.steps_of(longest)
    elif num_drafts:
      kind = _LOOKED_UP
    fed = view.num_rows + num_drafts + view.num_prefill_tokens
    fed = min(fed, buckets.max_query_tokens)
    computed = buckets.computed_tokens(view.num_rows, fed)
    size = (
      kind,
      bisect.bisect_left(buckets.rows, max(view.num_rows, 1)),
      bisect.bisect_left(buckets.query_tokens, computed),
      self._draft_steps.searchsorted(num_steps),
    )
    recent = self._recent[size]
    recent[self._counts[size] % _NUM_RECENT] = outcome.seconds
    self._counts[size] += 1
    self._last_seen[size] = view.step
    if self._counts[size] <= _NUM_RECENT or view.step % _FIT_EVERY == 0:
      self._believed = self._beliefs(view.step)

  def _beliefs(self, step: int) -> np.ndarray:
    """Returns seconds of all sizes."""
    # A first step may have had a hiccup, and a size that is dear is hardly
    # tried again. So one step does not count, unless there are no others.
    is_seen = self._counts > min(self._counts.max() - 1, 1)
    # A step that is seen late makes the next one seem short.
    usual = np.nanquantile(self._recent[is_seen], 0.5, axis=-1, method='lower')
    freshness = 0.5 ** ((step - self._last_seen[is_seen]) / _HALF_LIFE)
    # Errors are relative, so that no size outweighs the others.
    features = self._features[is_seen] / usual[:, None]
    weights = np.sqrt(np.maximum(freshness, 1e-6))
    ridge = _RIDGE / usual.mean() * np.eye(features.shape[1])
    ridge[0] = 0  # the time of any step
    coefficients, _ = _import_nnls()(
      np.concatenate([features * weights[:, None], ridge]),
      np.concatenate([weights, np.zeros(len(ridge))]),
    )
    beliefs = np.maximum(self._features @ coefficients, _SOME_SECONDS)
    counts = np.minimum(self._counts[is_seen], _NUM_RECENT)
    shares = freshness * counts / (counts + 1)
    beliefs[is_seen] += shares * (usual - beliefs[is_seen])
    return beliefs


class LookupCosts:
  """Seconds of steps with lookups, in an engine whose drafts a model makes."""

  def __init__(self, costs: LiveCosts):
    """Takes the costs that the engine's steps tell."""
    self._costs = costs

  def predict(self, *sizes: Any, **options: Any) -> cost_model.StepSeconds:
    return self._costs.predict(*sizes, **options, by_model=False)


def _import_nnls() -> Callable[..., tuple[np.ndarray, float]]:
  from scipy import optimize

  return optimize.nnls


def _stride(size: int) -> int:
  """Returns steps that reach all of a circle's places, the far ones first."""
  stride = max(round(_GOLDEN * size), 1)
  while math.gcd(stride, size) > 1:
    stride += 1
  return stride


def _features(rows, query_tokens, draft_steps) -> np.ndarray:
  """Returns the terms f64[4 kinds, rows, query tokens, steps, 6], up to 1."""
  grids = np.meshgrid(range(4), rows, query_tokens, draft_steps, indexing='ij')
  kinds, *sizes = (np.asarray(grid, float) for grid in grids)
  is_by_model = (kinds == _UNVERIFIED) | (kinds == _VERIFIED)
  is_looked_up = kinds == _LOOKED_UP
  sizes = [size / max(size.max(), 1) for size in sizes]
  ones = np.ones_like(kinds)
  return np.stack([ones, is_by_model, is_looked_up, *sizes], axis=-1)
