"""How `config.json`, or who loads a model, stretches rotary frequencies."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import RopeScaling

# Entries by the kinds that a model may be given that was trained without one.
_ORIGINAL = 'original_max_position_embeddings'
_NUMBERS = {
  'linear': ('factor', _ORIGINAL),
  'yarn': (
    'factor',
    _ORIGINAL,
    'attention_factor',
    'beta_fast',
    'beta_slow',
    'mscale',
    'mscale_all_dim',
  ),
}


def from_hf(rope: Mapping[str, Any], max_context: int) -> RopeScaling | None:
  """Returns the scaling of an entry of `rope_parameters`; None if it has none.

  Args:
    rope: entries by name, as transformers 5 has them.
    max_context: tokens of the longest text.

  Raises:
    UserError: an unknown kind of scaling.
  """
  kind = rope.get('rope_type', 'default')
  if kind == 'default':
    return None
  if kind == 'linear':
    return RopeScaling(kind='linear', factor=rope['factor'])
  if kind == 'llama3':
    return RopeScaling(
      kind='llama3',
      factor=rope['factor'],
      low_freq_factor=rope['low_freq_factor'],
      high_freq_factor=rope['high_freq_factor'],
      original_max_context=rope['original_max_position_embeddings'],
    )
  if kind == 'yarn':
    return _yarn(rope, max_context)
  if kind == 'proportional':
    return RopeScaling(
      kind='proportional',
      factor=rope.get('factor', 1.0),
      rotated_share=rope.get('partial_rotary_factor', 1.0),
    )
  raise errors.UserError(
    f'unknown rope scaling {kind!r}; supported: default, linear, llama3, yarn, '
    'proportional'
  )


def _yarn(rope: Mapping[str, Any], max_context: int) -> RopeScaling:
  original = rope['original_max_position_embeddings']
  factor = rope.get('factor') or max_context / original

  def magnitude(slope):
    return 1 + 0.1 * slope * math.log(max(factor, 1))

  attention_factor = rope.get('attention_factor')
  slopes = rope.get('mscale'), rope.get('mscale_all_dim')
  if attention_factor is None and all(slopes):
    attention_factor = magnitude(slopes[0]) / magnitude(slopes[1])
  elif attention_factor is None:
    attention_factor = magnitude(1)
  return RopeScaling(
    kind='yarn',
    factor=factor,
    low_freq_factor=rope.get('beta_slow') or 1.0,
    high_freq_factor=rope.get('beta_fast') or 32.0,
    original_max_context=original,
    attention_factor=attention_factor,
    is_truncated=rope.get('truncate', True),
  )


def override(config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
  """Returns the configuration of a model that is to take longer texts.

  Args:
    config: configuration of a model without a scaling.
    values: entries of `rope_scaling` in `config.json`. `rope_type` is linear or
      yarn, `factor` more than 1. `original_max_position_embeddings` is by
      default the `max_context` of the model, which becomes `factor` times that.

  Raises:
    UserError: the model has a scaling, or an entry makes no sense.
  """
  if config.rope_scaling is not None:
    raise errors.UserError(
      f'rope_scaling={values!r}: the model has the scaling '
      f'{config.rope_scaling.kind!r} already, by a factor of '
      f'{config.rope_scaling.factor:g}; leave rope_scaling out'
    )
  _check(values)
  values = {_ORIGINAL: config.max_context, **values}
  max_context = int(values[_ORIGINAL] * values['factor'])
  return dataclasses.replace(
    config,
    max_context=max_context,
    rope_scaling=from_hf(values, max_context),
  )


def _check(values: Mapping[str, Any]) -> None:
  """Raises UserError for what `override` cannot take."""
  known = ', '.join(_NUMBERS)
  if not isinstance(values, Mapping):
    raise errors.UserError(
      f'rope_scaling={values!r} must be an object with rope_type ({known}) and '
      'factor'
    )
  kind = values.get('rope_type')
  if kind not in _NUMBERS:
    raise errors.UserError(
      f'rope_scaling: rope_type={kind!r} is unknown; choose from {known}'
    )
  others = {'rope_type', 'truncate'} if kind == 'yarn' else {'rope_type'}
  for name, value in values.items():
    if name not in (*_NUMBERS[kind], *others):
      raise errors.UserError(
        f'rope_scaling: {kind} has no entry {name!r}; it has '
        f'{", ".join((*_NUMBERS[kind], *others - {"rope_type"}))}'
      )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _NUMBERS[kind] and not (is_number and value > 0):
      raise errors.UserError(
        f'rope_scaling: {name}={value!r} must be a positive number'
      )
  if not 1 < values.get('factor', 1) < math.inf:
    raise errors.UserError(
      f'rope_scaling: factor={values.get("factor")!r} must be more than 1, the '
      'length of texts over that which the model was trained for'
    )
