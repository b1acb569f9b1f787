"""Costs that were measured on the devices at hand."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from absl import logging

from swiftspec_jax import errors
from swiftspec_jax.policies import cost_model
from swiftspec_jax.policies.cost_model import tables
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostKey:
  """What costs depend on; they hold for nothing else.

  Attributes:
    target: name of the model.
    draft: name of the drafter and its model.
    dtype: dtype of the weights.
    device_kind: JAX's name of the device.
    num_devices: number of devices that hold the target.
    buckets: the compiled sizes.
    num_sequence_devices: number of these devices that share tokens.
  """

  target: str
  draft: str
  dtype: str
  device_kind: str
  num_devices: int
  buckets: StepBuckets
  num_sequence_devices: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
  """The time of one part of a step.

  Attributes:
    part: 'plain' (a whole step without drafts or prompts), 'target' (the
      forward of any other step), 'draft' (all forwards of a draft), 'intake'
      (a chunk of late tokens that a draft model reads) or 'overhead' (what
      verification and host add to a step with drafts).
    num_rows: declared size.
    num_query_tokens: declared size; 0 where the part does not depend on it.
    kv_tokens: tokens in the cache of all rows together, or 0.
    num_draft_steps: forwards of the draft, or 0.
    seconds: measured.
  """

  part: str
  num_rows: int
  num_query_tokens: int = 0
  kv_tokens: int = 0
  num_draft_steps: int = 0
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredCosts:
  """Costs by tables, one for each part of a step.

  Attributes:
    key: description of what was measured.
    parts: tables of 'plain' and 'intake' by rows, of 'target' and 'overhead'
      by rows and query tokens, and of 'draft' by rows and forwards. Without
      'intake', as for lookups, that takes no time.
  """

  key: CostKey
  parts: dict[str, tables.CostTable]

  def predict(
    self,
    num_rows: int,
    num_query_tokens: cost_model.Numbers,
    kv_tokens: float,
    num_draft_steps: cost_model.Numbers,
    *,
    finds_drafts: bool | np.ndarray = True,
    prefills_draft: bool | np.ndarray = False,
  ) -> cost_model.StepSeconds:
    parts = self.parts
    most = int(parts['target'].kv_tokens[-1])
    if kv_tokens > most:
      _warn(self.key, most)
    is_speculative = np.greater(num_draft_steps, 0)
    # A step of nothing but rows that decode has a time of its own.
    alone = self.key.buckets.pad_query_tokens(num_rows)
    verifies = is_speculative & finds_drafts
    is_plain = ~verifies & np.less_equal(num_query_tokens, alone)
    forward = parts['target'](num_rows, num_query_tokens, kv_tokens)
    plain = parts['plain'](num_rows, 0, kv_tokens)
    draft = parts['draft'](num_rows, num_draft_steps, kv_tokens)
    overhead = parts['overhead'](num_rows, num_query_tokens, 0)
    draft_prefill = 0.0
    if 'intake' in parts and np.any(prefills_draft):
      draft_prefill = np.where(
        prefills_draft, parts['intake'](num_rows, 0, kv_tokens), 0.0
      )
    return cost_model.StepSeconds(
      draft=np.where(is_speculative, draft, 0.0),
      target=np.where(is_plain, plain, forward),
      overhead=np.where(verifies, overhead, 0.0),
      draft_prefill=draft_prefill,
    )

  @property
  def drafts_by_model(self) -> bool:
    """Whether a draft model was measured, which has to read texts."""
    return 'intake' in self.parts


@functools.cache
def _warn(key: CostKey, kv_tokens: int) -> None:
  """Says once for every file of costs that it is too small."""
  logging.warning(
    'the costs of %s with drafts of %s were measured with up to %d tokens in '
    'the cache; for more they are extrapolated',
    key.target,
    key.draft,
    kv_tokens,
  )


def fit(key: CostKey, measurements: Sequence[Measurement]) -> MeasuredCosts:
  """Makes costs of measurements.

  Raises:
    UserError: measurements of a part other than 'intake' are missing, are not
      of declared sizes, or make no sense.
  """
  buckets = key.buckets
  steps = sorted(set(buckets.draft_steps))
  tokens = buckets.query_tokens
  # For each part the sizes of its second axis, and the features.
  kinds: dict[str, tuple[Sequence[int], tables.Features]] = {
    'plain': ((0,), lambda x, y, kv: (x * 0 + 1, x, kv)),
    'intake': ((0,), lambda x, y, kv: (x * 0 + 1, x, kv)),
    'target': (tokens, lambda x, y, kv: (x * 0 + 1, x, y, kv)),
    'draft': (steps, lambda x, y, kv: (np.minimum(y, 1), y, x * y, y * kv)),
    'overhead': (tokens, lambda x, y, kv: (x * 0 + 1, x, y)),
  }
  parts = {}
  for part, (second, features) in kinds.items():
    attribute = 'num_draft_steps' if part == 'draft' else 'num_query_tokens'
    own = [m for m in measurements if m.part == part]
    if not own and part == 'intake':
      continue
    if not own:
      raise errors.UserError(
        f'there are no measurements of {part!r}; every part of a step has to '
        'be measured, plain steps on their own'
      )
    points = np.array(
      [(m.num_rows, getattr(m, attribute), m.kv_tokens) for m in own], float
    )
    _check_sizes(part, points[:, 0], buckets.rows)
    _check_sizes(part, points[:, 1], second)
    parts[part] = tables.fit(
      part,
      points,
      np.array([m.seconds for m in own]),
      (buckets.rows, second, sorted(set(points[:, 2].astype(int).tolist()))),
      features,
    )
  return MeasuredCosts(key=key, parts=parts)


def _check_sizes(part: str, sizes: np.ndarray, declared: Sequence[int]) -> None:
  for size in sizes.tolist():
    if size not in declared:
      raise errors.UserError(
        f'{part} was measured at {size:g}, which is none of the declared sizes '
        f'{tuple(declared)}'
      )
