"""Reads matrices of float8 (e4m3) as they are published, with their scales.

A weight is `number * scale`, and a scale is that of a block of outputs and
inputs:

- 'fp8' (Qwen, DeepSeek): blocks of 128 x 128 in `weight_scale_inv`, which is no
  inverse but the factor itself, or one for the matrix;
- 'compressed-tensors' (llm-compressor): one for the matrix, one for each
  output, or blocks, in `weight_scale`.

Both may round activations while they run. Here activations stay as they are.

Legend: N outputs, K inputs.
"""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint.quantized import quantization_config
from swiftspec_jax.models import array_parts, families
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix

# Numbers of outputs and inputs that share a scale; None is all.
Block = tuple[int | None, int | None]

_NUMBER = ml_dtypes.float8_e4m3fn
_DTYPES = (_NUMBER, ml_dtypes.float8_e8m0fnu)
# All numbers by their bits: faster than a conversion.
_NUMBERS = np.arange(256, dtype=np.uint8).view(_NUMBER).astype(np.float32)
_SCALES = ('_scale_inv', '_scale')
_SUPPORTED = {
  'expert_dtype': ('fp8',),
  'fmt': ('e4m3',),
  'scale_fmt': ('float', 'ue8m0'),
}
# Entries that say how it was made or is run, or which matrices are not float8:
# each tensor says that itself.
_IGNORED = (
  'activation_scheme',
  'dequantize',
  'ignored_layers',
  'kv_cache_scheme',
  'modules_to_convert',
  'modules_to_not_convert',
  'quant_method',
  'weight_block_size',
)
_FORMATS = ('float-quantized', 'naive-quantized')
_SUPPORTED_WEIGHTS = {
  'num_bits': (8,),
  'strategy': ('tensor', 'channel', 'group', 'block'),
  'symmetric': (True,),
  'type': ('float',),
}


def block_of(values: Mapping[str, Any]) -> Block:
  """Returns what shares a scale by the entries of config.json.

  Raises:
    UserError: an entry is not understood, or says what is not supported.
  """
  options = quantization_config.options_of(values)
  if options['quant_method'] != quantization_config.COMPRESSED:
    quantization_config.check(options, _SUPPORTED, _IGNORED)
    size = options.get('weight_block_size')
    return _checked('weight_block_size', size or (None, None))
  weights = quantization_config.weights_of(
    options, _FORMATS, _SUPPORTED_WEIGHTS
  )
  if weights['strategy'] == 'block':
    return _checked('block_structure', weights.get('block_structure'))
  if weights['strategy'] == 'group':
    return _checked('group_size', (1, weights.get('group_size')))
  return (None if weights['strategy'] == 'tensor' else 1), None


def _checked(key: str, block: Any) -> Block:
  """Returns a block if it is one."""
  is_block = isinstance(block, list | tuple) and len(block) == 2
  if not is_block or not all(
    size is None or (isinstance(size, int) and size >= 1) for size in block
  ):
    reason = 'it must be two whole numbers of at least 1'
    quantization_config.refuse(key, block, reason)
  return tuple(block)


def dequantized(
  tensors: Mapping[str, np.ndarray], block: Block | None, name: str
) -> np.ndarray:
  """Returns a tensor, in float32 where it is stored as float8.

  Args:
    tensors: tensors as they are stored.
    block: sizes of what shares a scale; None if the config does not say.
    name: name of the tensor.

  Raises:
    UserError: there is no scale, or not one for each block.
  """
  weight = tensors[name]
  if weight.dtype not in _DTYPES:
    return weight
  scales, (rows, columns) = _scales_of(weight, tensors, block, name)
  num_outputs, num_inputs = weight.shape
  scales = scales.repeat(rows, axis=0)[:num_outputs]
  scales = scales.repeat(columns, axis=1)[:, :num_inputs]
  return _NUMBERS[weight.view(np.uint8)] * scales


def stored(
  tensors: Mapping[str, np.ndarray],
  block: Block | None,
  name: str,
  num_outputs: int,
  num_inputs: int,
) -> StoredMatrix | np.ndarray:
  """Returns a matrix [N, K] as it is stored.

  Args:
    tensors: tensors as they are stored.
    block: sizes as in `dequantized`.
    name: name of the tensor without `.weight`.
    num_outputs: N.
    num_inputs: K.

  Raises:
    UserError: as in `dequantized`, or the matrix has another shape.
  """
  name = f'{name}.weight'
  weight = families.get_checked(
    tensors.__getitem__, name, num_outputs, num_inputs
  )
  if weight.dtype not in _DTYPES:
    return weight
  scales, (rows, columns) = _scales_of(weight, tensors, block, name)
  # Groups of inputs are of one size.
  size = math.gcd(columns, num_inputs)
  scales = scales[np.arange(num_outputs) // rows]
  scales = scales[:, np.arange(0, num_inputs, size) // columns]
  return StoredMatrix(values=weight, scales=scales)


def _scales_of(
  weight: np.ndarray,
  tensors: Mapping[str, np.ndarray],
  block: Block | None,
  name: str,
) -> tuple[np.ndarray, tuple[int, int]]:
  """Returns scales f32, one for each block, and the sizes of a block."""
  scale_names = [name + x for x in _SCALES if name + x in tensors]
  is_matrix = weight.dtype == _NUMBER and weight.ndim == 2
  if not (is_matrix and block and scale_names):
    raise errors.UserError(
      f'tensor {name} is {weight.dtype} without a scale that '
      'quantization_config describes; take another checkpoint'
    )
  (num_outputs, num_inputs), (scale_name, *_) = weight.shape, scale_names
  rows, columns = block[0] or num_outputs, block[1] or num_inputs
  shape = -(-num_outputs // rows), -(-num_inputs // columns)
  scales = _checked_scales(tensors[scale_name], scale_name, shape)
  return scales, (rows, columns)


def _checked_scales(
  scales: np.ndarray, name: str, shape: tuple[int, int]
) -> np.ndarray:
  """Returns the scales f32[*shape] of the blocks of a matrix."""
  if scales.dtype.kind in 'biu':
    raise errors.UserError(
      f'tensor {name} is {scales.dtype}, no dtype of scales; take another '
      'checkpoint'
    )
  # One for the whole matrix may have any shape.
  if not scales.size == math.prod(shape) == 1:
    array_parts.check_shape(f'tensor {name}', scales.shape, shape)
  return scales.astype(np.float32).reshape(shape)
