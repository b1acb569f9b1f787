"""What config.json says of how matrices are stored, entry by entry.

llm-compressor has a scheme for groups of matrices.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from swiftspec_jax import errors

_KEY = 'quantization_config'
COMPRESSED = 'compressed-tensors'
PACKED = 'pack-quantized'  # several integers in a word
INT = 'int-quantized'
# Entries that say how it was made or is run, or which matrices are not stored
# so: each tensor says that itself.
_IGNORED = (
  'config_groups',
  'global_compression_ratio',
  'ignore',
  'kv_cache_scheme',
  'quant_method',
  'quantization_status',
  'run_compressed',
  'sparsity_config',
  'version',
)
_IGNORED_OF_GROUPS = ('input_activations', 'targets', 'weights')
# Inputs lie in their order, also where they were rounded in another.
_ORDERS = (None, False, 'weight', 'static')
_IGNORED_OF_WEIGHTS = (
  'block_structure',
  'group_size',
  'observer',
  'observer_kwargs',
  'scale_dtype',
  'zp_dtype',
)


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the entries; there are none where nothing is quantized.

  Args:
    values: entries of config.json.
  """
  options = values.get(_KEY)
  return options if isinstance(options, dict) else {}


def without(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the entries of config.json that describe the model alone."""
  return {key: value for key, value in values.items() if key != _KEY}


def check(
  options: Mapping[str, Any],
  supported: Mapping[str, tuple[Any, ...]],
  ignored: Collection[str],
  prefix: str = '',
) -> None:
  """Checks that all entries are understood.

  Args:
    options: entries.
    supported: values that an entry may have, by its name.
    ignored: names of entries that do not change what weights are stored.
    prefix: names of the entries around these, for messages.

  Raises:
    UserError: an entry is not understood, or says what is not supported.
  """
  for key, value in options.items():
    if key in supported:
      if value not in supported[key]:
        choices = ' or '.join(map(json.dumps, supported[key]))
        refuse(prefix + key, value, f'it must be {choices}')
    elif key not in ignored:
      refuse(prefix + key, value, 'it is not understood')


def refuse(key: str, value: Any, reason: str) -> NoReturn:
  """Raises UserError that names an entry."""
  raise errors.UserError(f'{_KEY}.{key}={value!r} is not supported; {reason}')


def kind_of(options: Mapping[str, Any]) -> str | None:
  """Returns the `weight_dtype` that entries of quantization_config speak of.

  It is None where they are not llm-compressor's, and 'float8' where their
  format is not that of integers.
  """
  if options.get('quant_method') != COMPRESSED:
    return None
  if options.get('format') == PACKED:
    groups = (options.get('config_groups') or {}).values()
    bits = [(group.get('weights') or {}).get('num_bits') for group in groups]
    return 'int8' if 8 in bits else 'int4'
  return 'int8' if options.get('format') == INT else 'float8'


def weights_of(
  options: Mapping[str, Any],
  formats: tuple[str, ...],
  supported: Mapping[str, tuple[Any, ...]],
) -> dict[str, Any]:
  """Returns the entries that say how the weights of all groups are stored.

  Args:
    options: entries of quantization_config.
    formats: values that `format` may have.
    supported: values that entries of weights may have, by their names.

  Raises:
    UserError: an entry is not understood, says what is not supported, or
      differs between groups.
  """
  of_all = {'format': formats, 'transform_config': (None, {})}
  check(options, of_all, _IGNORED)
  sparsity = options.get('sparsity_config') or {}
  if sparsity.get('format', 'dense') != 'dense':
    refuse('sparsity_config', sparsity, 'its format must be "dense"')
  groups = options.get('config_groups') or {}
  of_group = {'format': (None, *formats), 'output_activations': (None,)}
  of_weights = {'actorder': _ORDERS, 'dynamic': (False,), **supported}
  found = []
  for name, group in groups.items():
    prefix = f'config_groups.{name}.'
    check(group, of_group, _IGNORED_OF_GROUPS, prefix)
    required = dict.fromkeys(('num_bits', 'strategy', 'symmetric', 'type'))
    found.append(required | (group.get('weights') or {}))
    check(found[-1], of_weights, _IGNORED_OF_WEIGHTS, f'{prefix}weights.')
  if not found or any(weights != found[0] for weights in found):
    refuse('config_groups', groups, 'the weights of all must be stored alike')
  return found[0]
