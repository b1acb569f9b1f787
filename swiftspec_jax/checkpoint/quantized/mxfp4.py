"""Reads the experts of gpt-oss as they are published, in MXFP4.

A tensor NAME is stored as two. `NAME_blocks` has two numbers of four bits
(e2m1) in a byte, the first in the low bits. `NAME_scales` has the exponent of a
power of two, plus 127, for each 16 bytes (OCP Microscaling Formats, section 5).

Legend: X experts, N outputs, K inputs.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint.quantized import quantization_config
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix

_BYTES = 16  # with the same scale
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BIAS = 127
# Entries that say which tensors are not stored so, or how it is run.
_IGNORED = ('dequantize', 'modules_to_not_convert', 'quant_method')


def check(values: Mapping[str, Any]) -> None:
  """Raises UserError for entries of config.json that are not understood."""
  options = quantization_config.options_of(values)
  quantization_config.check(options, {}, _IGNORED)
  family = values.get('model_type')
  if family != 'gpt_oss':
    reason = f'it is read for gpt_oss, not for {family}'
    quantization_config.refuse('quant_method', 'mxfp4', reason)


def widened(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
  """Returns exactly a tensor that is stored as MXFP4: bf16[X, K, N].

  Raises:
    UserError: blocks and scales are of other shapes or dtypes.
  """
  blocks, scales = _checked(tensors, name)
  pairs = _PAIRS[scales[..., None], blocks]
  numbers = pairs.view(ml_dtypes.bfloat16)
  return np.swapaxes(numbers.reshape(*scales.shape[:-1], -1), -1, -2)


def stored(
  tensors: Mapping[str, np.ndarray], name: str
) -> StoredMatrix | np.ndarray:
  """Returns a tensor, as a matrix [X, K, N] where it is stored as MXFP4.

  Raises:
    UserError: as in `widened`.
  """
  if f'{name}_blocks' not in tensors:
    return tensors[name]
  blocks, scales = _checked(tensors, name)
  codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
  codes = codes.reshape(*scales.shape[:-1], -1)
  return StoredMatrix(
    # As int4 has these bits.
    values=np.swapaxes((codes ^ 8).view(np.int8) - np.int8(8), -1, -2),
    scales=np.swapaxes(scales, -1, -2),
  )


def _checked(
  tensors: Mapping[str, np.ndarray], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns blocks u8[X, N, K / 32, 16] and scales u8[X, N, K / 32]."""
  blocks, scales = tensors[f'{name}_blocks'], tensors[f'{name}_scales']
  is_mxfp4 = blocks.dtype == scales.dtype == np.uint8
  if not is_mxfp4 or blocks.shape != (*scales.shape, _BYTES):
    raise errors.UserError(
      f'tensors {name}_blocks and _scales are {blocks.dtype}{blocks.shape} and '
      f'{scales.dtype}{scales.shape}; MXFP4 is uint8 with {_BYTES} bytes for '
      'each scale'
    )
  return blocks, scales


def _make_pairs() -> np.ndarray:
  """Returns words u32[256, 256]: two numbers of bf16 by scale and by byte."""
  numbers = np.concatenate([_POSITIVE, -_POSITIVE])
  both = np.stack(np.meshgrid(numbers, numbers), axis=-1).reshape(-1, 2)
  exponents = np.arange(256)[:, None, None] - _BIAS
  with np.errstate(over='ignore'):
    scaled = np.ldexp(both[None], exponents).astype(ml_dtypes.bfloat16)
  return scaled.view(np.uint32)[..., 0]


_PAIRS = _make_pairs()
