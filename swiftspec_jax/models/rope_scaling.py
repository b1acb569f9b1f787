"""How a model stretches rotary frequencies, in the words of `config.json`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import RopeScaling

_FULL, _SLIDING = 'full_attention', 'sliding_attention'
_ORIGINAL = 'original_max_position_embeddings'
_LISTS = 'short_factor', 'long_factor'
# Entries by kind: those that it needs, and those that it may have.
_ENTRIES = {
  'default': ((), ()),
  'linear': (('factor',), (_ORIGINAL,)),
  'dynamic': (('factor',), (_ORIGINAL,)),
  'yarn': (
    (),
    (
      'factor',
      _ORIGINAL,
      'attention_factor',
      'beta_fast',
      'beta_slow',
      'mscale',
      'mscale_all_dim',
      'truncate',
    ),
  ),
  'llama3': (('factor', 'low_freq_factor', 'high_freq_factor'), (_ORIGINAL,)),
  'longrope': (_LISTS, ('factor', _ORIGINAL, 'attention_factor')),
  'proportional': ((), ('factor', 'partial_rotary_factor')),
}
# Fields of `RopeScaling` by kind and entry, with what a missing entry means.
_FIELDS: dict[str, dict[str, tuple[str, Any]]] = {
  'llama3': {
    'low_freq_factor': ('low_freq_factor', None),
    'high_freq_factor': ('high_freq_factor', None),
  },
  'yarn': {
    'beta_slow': ('low_freq_factor', 1.0),
    'beta_fast': ('high_freq_factor', 32.0),
    'truncate': ('is_truncated', True),
  },
  'proportional': {'partial_rotary_factor': ('rotated_share', 1.0)},
}
_WITH_ORIGINAL = 'llama3', 'yarn', 'longrope'  # these have such a field
# Text has the same position on all axes of mrope.
_OTHER_NAMES = {'su': 'longrope', 'mrope': 'default'}
_WITHOUT_EFFECT = (
  'type',
  'rope_type',
  'rope_theta',
  'finetuned',
  'mrope_section',
  'mrope_interleaved',
)
# max_position_embeddings of the others counts the stretched context.
_STRETCH_CONTEXT = 'linear', 'dynamic', 'yarn', 'proportional'
_GIVEN = 'linear', 'dynamic', 'yarn'  # kinds that `override` takes


def fields_from_hf(values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
  """Returns the fields of ModelConfig that say how positions are told apart.

  Args:
    values: complete Hugging Face configuration, with `rope_parameters` for all
      layers or by kind of layer.
    head_dim: size of a head.

  Raises:
    UserError: as `from_hf` does; or layers differ in more than `rope_theta`.
  """
  ropes = values['rope_parameters']
  by_layer = {k: rope for k, rope in ropes.items() if isinstance(rope, Mapping)}
  of_all = {k: value for k, value in ropes.items() if k not in by_layer}
  is_known = kind_of(of_all) == 'default' and {*of_all} <= {*_WITHOUT_EFFECT}
  if by_layer and not (is_known and {*by_layer} <= {_FULL, _SLIDING}):
    raise errors.UserError(
      f'rope_parameters={ropes!r} is not supported; its entries are for all '
      f'layers, or under {_FULL} and {_SLIDING}'
    )
  local = by_layer.get(_SLIDING, of_all)
  rope = by_layer.get(_FULL, local)
  if 'rope_theta' not in rope.keys() & local.keys():
    raise errors.UserError(f'rope_parameters={ropes!r} lacks rope_theta')
  longest, original = values['max_position_embeddings'], values.get(_ORIGINAL)
  _, optional = _ENTRIES.get(kind_of(rope), ((), ()))
  if original is not None and _ORIGINAL in optional:
    rope = {**rope, _ORIGINAL: original}
  scaling, max_context = from_hf(rope, longest, head_dim)
  fields = {
    'rope_theta': rope['rope_theta'],
    'rope_scaling': scaling,
    'max_context': max_context,
  }
  if _SLIDING not in by_layer or local == rope:
    return fields
  if from_hf(local, longest, head_dim)[0] is not None:
    raise errors.UserError(
      f'rope_parameters={ropes!r} is not supported; beside {_FULL}, {_SLIDING} '
      'has the rope_type default'
    )
  return {**fields, 'local_rope_theta': local['rope_theta']}


def from_hf(
  rope: Mapping[str, Any], max_context: int, head_dim: int
) -> tuple[RopeScaling | None, int]:
  """Reads an entry of `rope_parameters`, or `rope_scaling`.

  The context is what vLLM derives: `factor` times the original one of YaRN,
  `factor` times `max_position_embeddings` of linear and dynamic scaling, and
  `max_position_embeddings` itself elsewhere. Keys in a cache are rotated once,
  so frequencies that depend on the length of a text (dynamic, longrope) are
  those of the longest one, as in vLLM.

  Args:
    rope: entries by name.
    max_context: `max_position_embeddings`.
    head_dim: size of a head.

  Returns:
    The scaling, None if there is none; and tokens of the longest text.

  Raises:
    UserError: an unknown kind of scaling; an entry that it does not have, that
      it lacks, or that makes no sense.
  """
  kind = kind_of(rope)
  errors.check_known('unknown rope scaling', kind, _ENTRIES)
  entries = _checked(kind, rope, head_dim)
  if kind == 'default':
    return None, max_context
  original = entries.get(_ORIGINAL, max_context)
  implied = 1.0 if kind == 'proportional' else max_context / original
  factor = entries.get('factor', implied)
  stretched = original * factor if kind in _STRETCH_CONTEXT else max_context
  own = {
    field: entries.get(name, default)
    for name, (field, default) in _FIELDS.get(kind, {}).items()
  }
  if kind in _WITH_ORIGINAL:
    own['original_max_context'] = original
  if kind == 'yarn':
    own['attention_factor'] = _yarn_attention(entries, factor)
  elif kind == 'longrope':
    name = 'long_factor' if max_context > original else 'short_factor'
    growth = math.log(max(factor, 1)) / math.log(original)
    attention = entries.get('attention_factor', math.sqrt(1 + growth))
    own |= {'attention_factor': attention, 'divisors': tuple(entries[name])}
  return RopeScaling(kind=kind, factor=factor, **own), int(stretched)


def kind_of(rope: Mapping[str, Any]) -> str:
  """Returns the kind of scaling that entries name."""
  kind = str(rope.get('rope_type') or rope.get('type') or 'default')
  return _OTHER_NAMES.get(kind, kind)


def _yarn_attention(entries: Mapping[str, Any], factor: float) -> float:
  def magnitude(slope):
    return 1 + 0.1 * slope * math.log(max(factor, 1))

  slopes = entries.get('mscale'), entries.get('mscale_all_dim')
  default = (
    magnitude(slopes[0]) / magnitude(slopes[1]) if all(slopes) else magnitude(1)
  )
  return entries.get('attention_factor', default)


def _checked(
  kind: str, rope: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
  """Returns the entries that have an effect.

  Raises:
    UserError: as `from_hf` does.
  """
  entries = {
    name: value
    for name, value in rope.items()
    if value is not None
    and name not in _WITHOUT_EFFECT
    and (name, value) != ('partial_rotary_factor', 1)
  }
  needed, others = _ENTRIES[kind]
  for name in needed:
    if name not in entries:
      raise errors.UserError(f'rope_scaling: {kind} needs the entry {name!r}')
  for name, value in entries.items():
    if name not in (*needed, *others):
      known = ', '.join((*needed, *others)) or 'none'
      raise errors.UserError(
        f'rope_scaling: {kind} has no entry {name!r}; it has {known}'
      )
    if name in _LISTS:
      _check_list(name, value, head_dim // 2)
    elif name == 'truncate':
      if not isinstance(value, bool):
        raise errors.UserError(
          f'rope_scaling: truncate={value!r} must be true or false'
        )
    elif not _is_positive(value):
      raise errors.UserError(
        f'rope_scaling: {name}={value!r} must be a positive number'
      )
  return entries


def _check_list(name: str, value: Any, size: int) -> None:
  is_list = isinstance(value, Sequence) and not isinstance(value, str)
  if not (is_list and len(value) == size and all(map(_is_positive, value))):
    raise errors.UserError(
      f'rope_scaling: {name}={value!r} must have {size} positive numbers, one '
      'for each frequency of a head'
    )


def _is_positive(value: Any) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return is_number and 0 < value < math.inf


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """Returns the entries of `config.json` that `from_hf` reads."""
  scaling, max_context = config.rope_scaling, config.max_context
  if scaling is None:
    return {'max_position_embeddings': max_context, 'rope_scaling': None}
  kind = scaling.kind
  entries: dict[str, Any] = {'rope_type': kind, 'factor': scaling.factor}
  if kind in _WITH_ORIGINAL:
    entries[_ORIGINAL] = scaling.original_max_context
  elif kind in _STRETCH_CONTEXT:
    max_context = math.ceil(max_context / scaling.factor)
  if kind in ('yarn', 'longrope'):
    entries['attention_factor'] = scaling.attention_factor
  for name, (field, _) in _FIELDS.get(kind, {}).items():
    entries[name] = getattr(scaling, field)
  if kind == 'longrope':
    entries |= {name: list(scaling.divisors) for name in _LISTS}
  return {'max_position_embeddings': max_context, 'rope_scaling': entries}


def override(config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
  """Returns the configuration of a model that is to take longer texts.

  Args:
    config: configuration of a model without a scaling.
    values: entries of `rope_scaling` in `config.json`. `rope_type` (or `type`)
      is linear, dynamic or yarn, `factor` more than 1.
      `original_max_position_embeddings` is by default the `max_context` of the
      model, which becomes `factor` times that.

  Raises:
    UserError: the model has a scaling, or an entry makes no sense.
  """
  if config.rope_scaling is not None:
    raise errors.UserError(
      f'rope_scaling={values!r}: the model has the scaling '
      f'{config.rope_scaling.kind!r} already, by a factor of '
      f'{config.rope_scaling.factor:g}; leave rope_scaling out'
    )
  known = ', '.join(_GIVEN)
  if not isinstance(values, Mapping):
    raise errors.UserError(
      f'rope_scaling={values!r} must be an object with rope_type ({known}) and '
      'factor'
    )
  kind = kind_of(values)
  if kind not in _GIVEN:
    raise errors.UserError(
      f'rope_scaling: rope_type={kind!r} cannot be given to a model; choose '
      f'from {known}'
    )
  scaling, max_context = from_hf(values, config.max_context, config.head_dim)
  if not values.get('factor', 0) > 1:
    raise errors.UserError(
      f'rope_scaling: factor={values.get("factor")!r} must be more than 1, the '
      'length of texts over that which the model was trained for'
    )
  return dataclasses.replace(
    config, max_context=max_context, rope_scaling=scaling
  )
