"""How `config.json` says that rotary frequencies are stretched."""

import math
from collections.abc import Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.config.architecture import RopeScaling


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
