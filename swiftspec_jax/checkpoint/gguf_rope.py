"""How the metadata of a .gguf file stretch rotary frequencies."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.config.architecture import RopeScaling
from swiftspec_jax.models import rope_scaling

_ORIGINAL = 'original_context_length'
# Keys of files by their names in `config.json`.
_NAMES = {
  'type': 'rope_type',
  'factor': 'factor',
  _ORIGINAL: 'original_max_position_embeddings',
  'finetuned': 'finetuned',
  'yarn_beta_fast': 'beta_fast',
  'yarn_beta_slow': 'beta_slow',
  'yarn_attn_factor': 'attention_factor',
  'yarn_log_multiplier': 'mscale_all_dim',
}
_KINDS = 'none', 'linear', 'yarn'


def read(
  metadata: Mapping[str, Any],
  architecture: str,
  max_context: int,
  head_dim: int,
) -> tuple[RopeScaling | None, int]:
  """Returns the scaling, None if there is none, and tokens of the longest text.

  The context is `context_length`, as in llama.cpp, but at least `factor` times
  the original one where the file names that.

  Args:
    metadata: values by key.
    architecture: first part of the keys.
    max_context: `context_length` of the file.
    head_dim: size of a head.

  Raises:
    UserError: a scaling that is not supported.
  """
  prefix = f'{architecture}.rope.'
  given = {
    key.removeprefix(f'{prefix}scaling.'): value
    for key, value in metadata.items()
    if key.startswith(f'{prefix}scaling.')
  }
  # Files of 2023 have this key, and a scaling without a type is linear.
  factor = given.get('factor', metadata.get(f'{prefix}scale_linear'))
  given['factor'] = factor or 1.0  # 0 is none, too
  kind = given.setdefault('type', 'linear')
  errors.check_known(f'unknown {prefix}scaling.type', kind, _KINDS)
  rotated = metadata.get(f'{prefix}dimension_count', head_dim)
  if rotated != head_dim:
    raise errors.UserError(
      f'{prefix}dimension_count={rotated} is not supported; all {head_dim} '
      'numbers of a head are rotated'
    )
  attention = given.pop('attn_factor', 1.0)
  if given.get('yarn_ext_factor') == 1:
    del given['yarn_ext_factor']
  for key, value in given.items():
    if key not in _NAMES:
      raise errors.UserError(f'{prefix}scaling.{key}={value} is not supported')
  if kind == 'none' or (given['factor'] == 1 and attention == 1):
    return None, max_context
  entries = {_NAMES[key]: value for key, value in given.items()}
  if 'mscale_all_dim' in entries:
    entries['mscale'] = 1.0
  scaling, stretched = rope_scaling.from_hf(entries, max_context, head_dim)
  if _ORIGINAL in given:
    max_context = max(max_context, stretched)
  attention *= scaling.attention_factor
  return dataclasses.replace(scaling, attention_factor=attention), max_context
