"""Reads matrices of int8 as llm-compressor publishes them.

A weight is `integer * scale`, and a scale is that of the matrix, of an output,
or of an output and a group of inputs. The integers are a tensor of int8
('int-quantized'), or lie plus 128 in words of four ('pack-quantized').
Activations, which others round while they run, stay as they are here.

Legend: N outputs, K inputs, C groups of inputs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint.quantized import quantization_config
from swiftspec_jax.models import families
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix

_FORMATS = (quantization_config.INT, quantization_config.PACKED)
_SUPPORTED = {
  'num_bits': (8,),
  'strategy': ('tensor', 'channel', 'group'),
  'symmetric': (True,),
  'type': ('int',),
}


def check(values: Mapping[str, Any]) -> None:
  """Raises UserError for entries of config.json that are not understood."""
  options = quantization_config.options_of(values)
  quantization_config.weights_of(options, _FORMATS, _SUPPORTED)


def stored(
  tensors: Mapping[str, np.ndarray],
  name: str,
  num_outputs: int,
  num_inputs: int,
) -> StoredMatrix | np.ndarray:
  """Returns a matrix [N, K] as it is stored.

  Args:
    tensors: tensors as they are stored.
    name: name of the tensor without `.weight`.
    num_outputs: N.
    num_inputs: K.

  Raises:
    UserError: a tensor has another shape than the config or the others say.
  """

  def checked(kind, *shape):
    return families.get_checked(tensors.__getitem__, f'{name}.{kind}', *shape)

  if f'{name}.weight_packed' in tensors:
    words = checked('weight_packed', num_outputs, -(-num_inputs // 4))
    integers = (words.view(np.uint8) ^ 128).view(np.int8)[:, :num_inputs]
  else:
    integers = checked('weight', num_outputs, num_inputs)
    if integers.dtype != np.int8:
      return integers
  scales = tensors[f'{name}.weight_scale'].astype(np.float32)
  if scales.size == 1:
    scales = np.broadcast_to(scales.reshape(1, 1), (num_outputs, 1))
  num_groups = scales.shape[-1]
  if scales.shape != (num_outputs, num_groups) or num_inputs % num_groups:
    raise errors.UserError(
      f'tensor {name}.weight_scale has shape {scales.shape}, which are no '
      f'groups of {num_inputs} inputs of {num_outputs} outputs: weights and '
      'config do not belong together'
    )
  return StoredMatrix(values=integers, scales=scales)
