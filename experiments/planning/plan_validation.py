"""Published step times, and how well the model of a forward predicts them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from configs import launches, models
from configs.hardware import nvidia
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.policies.cost_model import profiles
from swiftspec_jax.simulator.planning import forward as forward_lib
from swiftspec_jax.simulator.planning.forward import Chip, Efficiency, Forward

_CONTEXT = 500  # tokens; the papers do not say, their prompts are short
_MICRO = 1e6  # what is fitted has sizes near one
_LEAST = 1e-3  # of what is fitted
_DRAFTS = models.LLAMA_1B, models.LLAMA_3B, models.QWEN2_1B5
_TABLE_1 = {  # milliseconds at 1, 2, 4, 8 GPUs
  '1B': (models.LLAMA_1B, 1.58, 1.58, 1.73, 1.72),
  '3B': (models.LLAMA_3B, 2.77, 2.61, 2.80, 3.27),
  '8B': (models.LLAMA_8B, 4.30, 3.46, 3.50, 3.78),
  '70B': (models.LLAMA_70B, 24.78, 15.90, 11.86, 11.22),
}
# What the constants are not fitted to: (source, model, GPUs, tokens, is fused,
# milliseconds). That of table 3 is 80 times its layer.
_HELD_OUT = (
  ('table 3', models.LLAMA_70B, 4, 8, False, 10.50),
  ('choice of bs', models.LLAMA_70B, 4, 4, True, 10.32),
  ('choice of bs', models.LLAMA_70B, 4, 8, True, 10.39),
  ('choice of bs', models.LLAMA_70B, 4, 16, True, 13.25),
  ('table 7, target', models.QWEN2_72B, 6, 8, True, 10.48),
  ('table 7, target', models.QWEN2_72B, 8, 8, True, 10.34),
  ('table 7, draft', models.QWEN2_1B5, 2, 8, True, 3.25),
  ('table 7, draft', models.QWEN2_1B5, 8, 8, True, 3.73),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """A step time that was published or measured.

  Attributes:
    source: place of the figure.
    what: model, GPUs and tokens.
    forward: the step.
    chip: the hardware.
    seconds: the time.
    is_fitted: whether the constants are fitted to it.
  """

  source: str
  what: str
  forward: Forward
  chip: Chip
  seconds: float
  is_fitted: bool = True

  @property
  def is_draft(self) -> bool:
    """Whether the model is of a draft's size."""
    plain = dataclasses.replace(self.forward.config, weight_dtype=None)
    return plain in _DRAFTS

  def predict(self, constants: Mapping[str, Any]) -> float:
    """Returns the seconds of the step by constants, see `fit`."""
    chip = dataclasses.replace(self.chip, **constants)
    return forward_lib.predict(self.forward, chip).total


def points() -> list[Point]:
  """Returns all published step times, those of the fit first."""
  found = [
    _point('SwiftSpec, table 1', config, num_chips, 1, False, time, True)
    for config, *times in _TABLE_1.values()
    for num_chips, time in zip((1, 2, 4, 8), times, strict=True)
  ]
  for name, config, num_chips in (
    ('llama-8b-h100', models.LLAMA_8B, 1),
    ('llama-70b-h100', models.LLAMA_70B, 4),
  ):
    costs = profiles.get(name).predict(1, 1, _CONTEXT, 0)
    found.append(
      _point(
        f'SmartSpec, {name}', config, num_chips, 1, False,
        1e3 * costs.target, True, weight_dtype=None, chip=nvidia.H100,
      )
    )  # fmt: skip
  return found + [
    _point(f'SwiftSpec, {source}', *rest, False) for source, *rest in _HELD_OUT
  ]


def _point(
  source: str,
  config: ModelConfig,
  num_chips: int,
  num_tokens: int,
  is_fused: bool,
  milliseconds: float,
  is_fitted: bool,
  *,
  weight_dtype: str | None = 'int4',
  chip: Chip = nvidia.H800,
) -> Point:
  name = next(name for name, known in models.NAMES.items() if known == config)
  return Point(
    source=source,
    what=f'{name}, {num_chips} x {chip.name}, {num_tokens} tokens'
    f'{", fused" if is_fused else ""}',
    forward=Forward(
      config=dataclasses.replace(config, weight_dtype=weight_dtype),
      num_chips=num_chips,
      num_tokens=num_tokens,
      context=_CONTEXT,
      launches=launches.published(weight_dtype, is_fused).verify,
    ),
    chip=chip,
    seconds=milliseconds / 1e3,
    is_fitted=is_fitted,
  )


def fit(fitted: Sequence[Point]) -> dict[str, Any]:
  """Returns the constants with the least squares of relative errors.

  They are `launch_seconds` and `efficiency` of a `Chip`, three numbers. One of
  which the points say nothing stays that of their first chip.
  """

  def constants(values) -> dict[str, Any]:
    launch, wide, quantized = values
    efficiency = Efficiency(wide=wide, quantized=quantized)
    return {'launch_seconds': launch / _MICRO, 'efficiency': efficiency}

  def errors(values):
    own = constants(values)
    return [np.log(p.predict(own) / p.seconds) for p in fitted]

  chip = fitted[0].chip
  shares = dataclasses.astuple(chip.efficiency)
  start = (chip.launch_seconds * _MICRO, *shares)
  bounds = (_LEAST, np.inf)
  return constants(optimize.least_squares(errors, start, bounds=bounds).x)


def row(
  source: str, what: str, predicted: float, published: float
) -> dict[str, Any]:
  """Returns what all rows of validation.jsonl have."""
  return {
    'source': source,
    'what': what,
    'predicted': predicted,
    'published': published,
    'error': predicted / published - 1,
  }


def validate(found: Sequence[Point]) -> list[dict]:
  """Returns a row for each point, with errors relative to its seconds.

  `left_out_error` is that of constants fitted to all other fitted points; for
  a point that is not among them it is the error.
  """
  fitted = [point for point in found if point.is_fitted]
  constants = fit(fitted)
  rows = []
  for point in found:
    others = constants
    if point.is_fitted:
      others = fit([p for p in fitted if p is not point])
    predicted = point.predict(constants)
    rows.append(
      {
        **row(point.source, point.what, predicted, point.seconds),
        'left_out_error': point.predict(others) / point.seconds - 1,
        'is_fitted': point.is_fitted,
        'is_draft': point.is_draft,
      }
    )
  return rows
