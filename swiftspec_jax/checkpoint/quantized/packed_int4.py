"""Reads int4 matrices as AWQ, GPTQ and llm-compressor publish them.

All store, for groups of inputs, `(integer - zero point) * scale` of integers
from 0 to 15, eight in a word of 32 bits. They differ in what a word holds:

- AWQ ('gemm'): eight outputs of one input, in the order 0 2 4 6 1 3 5 7;
- GPTQ: eight inputs of one output, and eight zero points of one group, all in
  their order. Zero points are stored less one, but for 'gptq_v2'.
- 'compressed-tensors' ('pack-quantized'): eight inputs of one output, and the
  zero points of eight outputs, all in their order. Tensors have outputs first.

Legend: K inputs, N outputs, C groups of inputs.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint.quantized import quantization_config
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models.matrices.quantization import MIDDLE
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix

_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)
# Where a word of AWQ has its first output, its second, and so on.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_WITH_BIAS = ('q_proj', 'k_proj', 'v_proj')
# Entries that say how a matrix is stored, and what they may be.
_COMMON = {
  'bits': (4,),
  'desc_act': (False,),
  'dynamic': (None, {}),
  'hyb_act': (False,),
  'is_marlin_format': (False,),
  'lm_head': (False,),
  'pack_dtype': ('int32',),
  'sym': (True, False),
}
_AWQ, _GPTQ = ('gemm', 'GEMM'), ('gptq', 'gptq_v2')
_SUPPORTED = {
  'awq': {'version': _AWQ, 'zero_point': (True,), 'format': _AWQ},
  'gptq': {'format': _GPTQ, 'checkpoint_format': _GPTQ},
}
_SUPPORTED_WEIGHTS = {
  'num_bits': (4,),
  'strategy': ('group', 'channel'),
  'symmetric': (True, False),
  'type': ('int',),
}
# How a rule for matrices that are as they were begins: tensors say that, too.
_NOT_PACKED = '-:'
# Entries that say how it was made, what to run it with, or which matrices are
# not packed: those of layers would be found missing.
_IGNORED = (
  'backend',
  'batch_size',
  'block_name_to_quantize',
  'cache_block_outputs',
  'damp_percent',
  'dataset',
  'disable_exllama',
  'do_fuse',
  'exllama_config',
  'fuse_max_seq_len',
  'group_size',
  'max_input_length',
  'meta',
  'model_file_base_name',
  'model_name_or_path',
  'model_seqlen',
  'module_name_preceding_first_block',
  'modules_in_block_to_quantize',
  'modules_to_fuse',
  'modules_to_not_convert',
  'pad_token_id',
  'quant_method',
  'static_groups',
  'tokenizer',
  'true_sequential',
  'use_cuda_fp16',
  'use_exllama',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
  """How the matrices of a checkpoint are stored.

  Attributes:
    method: name of the format in config.json; it says what a word holds.
    group_size: inputs that share a scale; -1 is all.
    zero_shift: number that is added to zero points; None if there are none.
  """

  method: str
  group_size: int
  zero_shift: int | None


def packing_of(values: Mapping[str, Any]) -> Packing:
  """Returns how matrices are stored by the entries of config.json.

  Raises:
    UserError: an entry is not understood, or says what is not supported.
  """
  options = quantization_config.options_of(values)
  method, kind = options.get('quant_method'), options.get('format')
  if method == quantization_config.COMPRESSED:
    weights = quantization_config.weights_of(
      options, (kind,), _SUPPORTED_WEIGHTS
    )
    is_grouped = weights['strategy'] == 'group'
    group_size = weights.get('group_size') if is_grouped else -1
    zero_shift = None if weights['symmetric'] else 0
  else:
    supported = {**_COMMON, **_SUPPORTED[method]}
    rules = options.get('dynamic') or {}
    if all(rule.startswith(_NOT_PACKED) for rule in rules):
      supported['dynamic'] = (options.get('dynamic'),)
    quantization_config.check(options, supported, _IGNORED)
    group_size = options.get('group_size')
    is_version_2 = 'gptq_v2' in (options.get('checkpoint_format'), kind)
    zero_shift = int(method == 'gptq' and not is_version_2)
  refuse = quantization_config.refuse
  is_whole = isinstance(group_size, int) and group_size >= 1
  if not is_whole and group_size != -1:
    refuse('group_size', group_size, 'it must be -1 or at least 1')
  if values.get('model_type') == 'gpt_oss':
    refuse('quant_method', method, 'experts of gpt_oss are read in MXFP4 alone')
  return Packing(method=method, group_size=group_size, zero_shift=zero_shift)


@dataclasses.dataclass(frozen=True)
class Reader:
  """Reads packed matrices.

  Attributes:
    tensors: tensors as they are stored.
    packing: format in which they are stored.
    config: the model's.
  """

  tensors: Mapping[str, np.ndarray]
  packing: Packing
  config: ModelConfig

  def read(
    self, name: str, num_outputs: int, num_inputs: int
  ) -> StoredMatrix | np.ndarray:
    """Returns the matrix [N, K] of a name without `.weight`.

    Raises:
      UserError: a tensor is missing or has another shape, or says something
        that the packing does not.
    """
    if f'{name}.weight' in self.tensors:
      return self._get(name, 'weight', num_outputs, num_inputs)
    size = self.packing.group_size
    size = num_inputs if size == -1 else size
    if num_inputs % size:
      raise errors.UserError(
        f'{name} has {num_inputs} inputs, no multiple of group_size={size}'
      )
    num_groups = num_inputs // size
    self._check_order(name, size, num_inputs)
    self._check_bias(name, num_outputs)

    is_compressed = self.packing.method == quantization_config.COMPRESSED
    read = self._outputs_first if is_compressed else self._inputs_first
    integers, scales, zeros = read(name, num_inputs, num_outputs, num_groups)
    scales = scales.astype(np.float32)
    return StoredMatrix(
      values=integers - np.int8(MIDDLE),
      scales=scales,
      offsets=(MIDDLE - zeros) * scales,
    )

  def _get(self, name: str, kind: str, *shape: int) -> np.ndarray:
    get = self.tensors.__getitem__
    return families.get_checked(get, f'{name}.{kind}', *shape)

  def _inputs_first(
    self, name: str, num_inputs: int, num_outputs: int, num_groups: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns integers [N, K], scales [N, C] and zero points [N, C]."""
    get = functools.partial(self._get, name)
    zeros = get('qzeros', num_groups, num_outputs // 8)
    if self.packing.method == 'awq':
      words = get('qweight', num_inputs, num_outputs // 8)
      integers, zeros = (_unpacked(x)[..., _AWQ_PLACES] for x in (words, zeros))
    else:
      words = get('qweight', num_inputs // 8, num_outputs)
      integers = np.swapaxes(_unpacked(words), 1, 2)
      zeros = _unpacked(zeros)
    return (
      integers.reshape(num_inputs, num_outputs).T,
      get('scales', num_groups, num_outputs).T,
      zeros.reshape(num_groups, num_outputs).T + self.packing.zero_shift,
    )

  def _outputs_first(
    self, name: str, num_inputs: int, num_outputs: int, num_groups: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the same of compressed-tensors."""
    get = functools.partial(self._get, name)
    words = get('weight_packed', num_outputs, num_inputs // 8)
    zeros = np.full((num_outputs, num_groups), MIDDLE)
    if self.packing.zero_shift is not None:
      packed = get('weight_zero_point', num_outputs // 8, num_groups)
      zeros = np.swapaxes(_unpacked(packed), 1, 2).reshape(zeros.shape)
    integers = _unpacked(words).reshape(num_outputs, num_inputs)
    return integers, get('weight_scale', num_outputs, num_groups), zeros

  def _check_order(self, name: str, group_size: int, num_inputs: int) -> None:
    if f'{name}.g_idx' not in self.tensors:
      return
    groups = self._get(name, 'g_idx', num_inputs)
    if not np.array_equal(groups, np.arange(num_inputs) // group_size):
      raise errors.UserError(
        f'tensor {name}.g_idx has inputs in another order (desc_act=true), '
        'which is not supported; take a checkpoint with desc_act=false'
      )

  def _check_bias(self, name: str, num_outputs: int) -> None:
    """Some checkpoints have zeros where the model has no bias."""
    is_used = self.config.use_qkv_bias and name.endswith(_WITH_BIAS)
    if is_used or f'{name}.bias' not in self.tensors:
      return
    if self._get(name, 'bias', num_outputs).any():
      raise errors.UserError(
        f'tensor {name}.bias is not zero, but {self.config.family} has no bias '
        'there'
      )


def _unpacked(words: np.ndarray) -> np.ndarray:
  """Returns the integers int8[..., 8] from 0 to 15 of words int32[...]."""
  nibbles = words.view(np.uint32)[..., None] >> _SHIFTS & 15
  return nibbles.astype(np.int8)
