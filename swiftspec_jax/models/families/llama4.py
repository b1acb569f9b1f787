"""Llama 4: its configuration, and how its heads are rotated.

Its attention is described by `IRope`. Most layers have experts, of which one is
for all tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config.architecture import Experts, IRope

FAMILY = 'llama4_text'
WITH_TOWER = 'llama4'  # the same beside a vision tower
_KINDS = ('chunked_attention', 'full_attention')


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of ModelConfig that Llama lacks.

  Args:
    values: complete Hugging Face configuration of the decoder.

  Raises:
    UserError: a kind of layer that Llama 4 does not have.
  """
  layers = range(values['num_hidden_layers'])
  for kind in values['layer_types']:
    if kind not in _KINDS:
      raise errors.UserError(
        f'layer_types with {kind!r} is not supported for {FAMILY}; layers are '
        f'{" or ".join(_KINDS)}'
      )
  chunk_size = values['attention_chunk_size']
  is_chunked = [
    chunk_size is not None and kind == _KINDS[0]
    for kind in values['layer_types']
  ]
  is_tuned = values['attn_temperature_tuning']
  return {
    'ffw_dim': values['intermediate_size_mlp'],
    'sliding_window': chunk_size if any(is_chunked) else None,
    'sliding_layers': tuple(is_chunked) if any(is_chunked) else (),
    'irope': IRope(
      nope_layers=tuple(i for i in layers if not values['no_rope_layers'][i]),
      floor_scale=values['floor_scale'],
      attn_scale=values['attn_scale'] if is_tuned else 0.0,
      norms_rotated=values['use_qk_norm'],
    ),
    'experts': Experts(
      num_experts=values['num_local_experts'],
      num_active=values['num_experts_per_tok'],
      ffw_dim=values['intermediate_size'],
      dense_layers=tuple(i for i in layers if i not in values['moe_layers']),
      scales_inputs=True,
      has_shared=True,
    ),
  }


def rotated_halves(heads: np.ndarray, axis: int) -> np.ndarray:
  """Returns heads with `axis`, of size E, as the decoder rotates it.

  What is rotated together lies side by side in the checkpoint, and in halves
  here.
  """
  places = np.arange(heads.shape[axis])
  return np.take(heads, [*places[::2], *places[1::2]], axis)
