"""Model families: Hugging Face configurations and parameter names.

Everything a family changes lies here: how its `config.json` becomes a
ModelConfig and how its named tensors become the parameter tree.
"""

from swiftspec_jax.models.families.registry import (
  FAMILIES,
  MIMO,
  SAME_CONFIG,
  Family,
  config_from_hf,
  supported,
)
from swiftspec_jax.models.families.tensors import (
  Place,
  as_rotated,
  get_checked,
  layer_from_hf,
  params_from_hf,
)

__all__ = [
  'FAMILIES',
  'MIMO',
  'SAME_CONFIG',
  'Family',
  'Place',
  'as_rotated',
  'config_from_hf',
  'get_checked',
  'layer_from_hf',
  'params_from_hf',
  'supported',
]
