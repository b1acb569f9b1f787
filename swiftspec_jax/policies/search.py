"""The length and the number of draft tokens with the highest goodput.

Goodput is the expected number of tokens that a step emits, over its predicted
seconds (SmartSpec, arXiv 2406.14066). All declared lengths are compared, each
with all declared sizes of the target's step: with padding, costs are steps, and
the search for a single peak would stop on the wrong one.

Legend: B rows, K longest draft, C candidate lengths, E candidate sizes.
"""

import bisect
import dataclasses
import functools

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies import cost_model

# Gains are counted in classes, four for each halving: the exponent of a float64
# and the first two bits of its mantissa name the class.
_CLASS_SHIFT = 50
_FIRST_CLASS = 1023 << 2  # of 1.0
_NUM_CLASSES = 32
# A text that a draft model reads is of use in many steps: each is charged
# this share of the time that it takes.
_PREFILL_SHARE = 1 / 64


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
  lengths: np.ndarray,
  draft_steps: np.ndarray,
  coverage: float = 1.0,
) -> Scores:
  """Scores longest drafts, each with the best number of tokens.

  Where prompts share the step, goodput does not count their time, but what it
  costs to feed them later (`_beside_prompts`). It counts a small share of the
  time in which a draft model reads late tokens.

  Args:
    view: the batch.
    gains: f64[K, B], 0 for what must not be drafted.
    costs: model of the seconds of a step.
    lengths: i64[C] longest drafts. With 0 nothing is verified, even if there
      are forwards of the draft.
    draft_steps: i64[C] forwards that the draft needs for each.
    coverage: share of the rows that will have a draft.
  """
  counts, sums = _curves(gains, lengths)
  predict = functools.partial(
    costs.predict,
    view.buckets.pad_rows(max(view.num_rows, 1)),
    kv_tokens=int(view.kv_lengths.sum()) + view.prefill_kv_tokens,
    num_draft_steps=draft_steps[:, None],
    finds_drafts=lengths[:, None] > 0,
    prefills_draft=(draft_steps[:, None] > 0) & (view.num_unread_tokens > 0),
  )
  measure = _beside_prompts if view.num_prefill_tokens else _alone
  # Rows that must not be drafted for are not asked.
  num_asked = max(np.count_nonzero(gains[:1]), 1)
  num_tokens, gained, seconds, not_counted = measure(
    view, counts, sums, predict, coverage, num_asked
  )
  expected = view.num_rows + coverage * gained
  goodput = expected / (seconds - not_counted - _spread(view, predict))
  best = goodput.argmax(axis=1)
  chosen = np.arange(len(lengths)), best
  return Scores(
    goodput=goodput[chosen],
    num_tokens=num_tokens[chosen],
    expected_tokens=expected[chosen],
    expected_seconds=seconds[chosen],
  )


def _spread(view, predict):
  """Returns the seconds f64[C, 1] of a step that other steps are charged."""
  if not view.num_unread_tokens:
    return 0.0
  num_chunks = view.num_unread_tokens / view.buckets.max_query_tokens
  draft_prefill = predict(view.buckets.query_token_array[:1]).draft_prefill
  return (1 - _PREFILL_SHARE * max(num_chunks, 1)) * draft_prefill


def _alone(view, counts, sums, predict, coverage, num_asked):
  """Returns tokens, gain and seconds of a step that is padded.

  With few rows it is often none that has a draft; the step is a plain one then.
  """
  declared = view.buckets.query_tokens
  if view.pads_absent_drafts:
    coverage = 1.0
  plain_share = (1 - coverage) ** num_asked  # of such steps
  # Of rows with a draft, in the other steps.
  share = coverage / (1 - plain_share)
  most = view.num_rows + share * counts[-1, -1]
  first = bisect.bisect_left(declared, view.num_rows)
  last = bisect.bisect_left(declared, most)
  sizes = view.buckets.query_token_array[first : last + 1]
  room = (sizes - view.num_rows) / share
  room = np.minimum(room, view.max_draft_tokens)
  num_tokens = np.minimum(room, counts[:, -1:])
  gained = _interpolate(num_tokens, counts, sums)
  # A hair less, so that rounding does not ask for the next size.
  fed = view.num_rows + share * num_tokens - 1e-6
  computed = view.buckets.computed_tokens(view.num_rows, fed)
  seconds = predict(computed).total
  if plain_share:
    padded_rows = view.buckets.pad_rows(view.num_rows)
    plain = predict(padded_rows, finds_drafts=False).total
    seconds = (1 - plain_share) * seconds + plain_share * plain
  return num_tokens, gained, seconds, 0.0


def _beside_prompts(view, counts, sums, predict, coverage, num_asked):
  """Returns tokens, gain and seconds of a step that prompts share.

  Chunks of prompts take what room there is, so which declared size a few draft
  tokens bring about is chance: times between the sizes are interpolated. The
  time of the prompts themselves is no draft's doing.

  d draft tokens that a full step has no room for take the place of as many
  tokens of prompts, which a later full step feeds: at s seconds each, its share
  of that step. All N requests that are present wait for it, B rows that decode
  and those whose prompts are not fed yet. Each could emit g / B tokens a second
  meanwhile, if g is the goodput. So a step of t seconds that is expected to
  emit e tokens really adds e - N d s g / B of them. That is g t if

    g = e / (t + d s N / B).

  Returns:
    Tokens, gain and seconds; and the part of the seconds that goodput does not
    count, less what it counts of later steps.
  """
  del num_asked
  sizes = view.buckets.query_token_array
  at_sizes = predict(sizes).total
  fed = view.num_rows + view.num_prefill_tokens + coverage * counts
  points = np.broadcast_to(sizes, at_sizes.shape)
  seconds = _interpolate(np.minimum(fed, sizes[-1]), points, at_sizes)
  seconds[counts > view.max_draft_tokens] = np.inf
  num_present = view.num_rows + view.num_filling + view.num_waiting
  share = at_sizes[:, -1:] / sizes[-1]
  displaced = np.maximum(fed - sizes[-1], 0)
  later = displaced * share * num_present / max(view.num_rows, 1)
  prompt_seconds = seconds[0, 0] - np.interp(view.num_rows, sizes, at_sizes[0])
  return counts, sums, seconds, prompt_seconds - later


def _interpolate(
  places: np.ndarray, points: np.ndarray, values: np.ndarray
) -> np.ndarray:
  """Returns what C curves f64[C, P] are at places f64[C, E] within them."""
  # One call for all curves: each has a stretch of the axis for itself.
  starts = np.arange(len(points))[:, None] * (points[:, -1].max() + 1)
  found = np.interp(
    (places + starts).ravel(), (points + starts).ravel(), values.ravel()
  )
  return found.reshape(places.shape)


def _curves(
  gains: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns how the sum of gains grows with the number of tokens.

  Instead of sorting the tokens for every length, tokens of about equal gain
  are counted together; between these points the curve is a line.

  Returns:
    Numbers of tokens, and for each the sum of the gains of that many best
    tokens, both f64[C, classes + 1], for drafts of each of the lengths.
  """
  num_positions = len(gains)
  classes = _FIRST_CLASS - (gains.view(np.int64) >> _CLASS_SHIFT)
  np.minimum(classes, _NUM_CLASSES - 1, out=classes)
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
  counts, sums = found.cumsum(axis=1)[:, lengths].cumsum(axis=2)
  return counts, sums
