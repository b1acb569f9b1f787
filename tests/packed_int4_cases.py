"""Packs matrices as AWQ and GPTQ checkpoints do, number by number."""

import numpy as np
from checkpoint_cases import write_pair

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
OPTIONS = {
  'awq': {
    'quant_method': 'awq',
    'bits': 4,
    'version': 'gemm',
    'zero_point': True,
    'modules_to_not_convert': None,
  },
  'gptq': {
    'quant_method': 'gptq',
    'bits': 4,
    'desc_act': False,
    'sym': False,
    'true_sequential': True,
    'damp_percent': 0.01,
  },
}
COMPRESSED = 'compressed-tensors'
OPTIONS[COMPRESSED] = {
  'quant_method': COMPRESSED,
  'format': 'pack-quantized',
  'quantization_status': 'compressed',
  'ignore': ['lm_head'],
}
OPTIONS['gptq_v2'] = OPTIONS['gptq'] | {'checkpoint_format': 'gptq_v2'}


def word(integers):
  """Eight integers from 0 to 15 in a word, the first one in its lowest bits."""
  total = sum(int(n) << 4 * i for i, n in enumerate(integers))
  return total - 2**32 if total >= 2**31 else total


def pack_rows(matrix, order=range(8)):
  """Words of eight neighbours in a row."""
  return np.array(
    [
      [word(row[i + j] for j in order) for i in range(0, len(row), 8)]
      for row in matrix.tolist()
    ],
    np.int32,
  )


def options_of(kind, group_size, is_symmetric=False):
  """What config.json says."""
  if kind != COMPRESSED:
    return OPTIONS[kind] | {'group_size': group_size}
  weights = {
    'num_bits': 4,
    'type': 'int',
    'symmetric': is_symmetric,
    'strategy': 'channel' if group_size == -1 else 'group',
    'group_size': None if group_size == -1 else group_size,
    'actorder': 'weight',
    'dynamic': False,
  }
  group = {'targets': ['Linear'], 'weights': weights}
  return OPTIONS[kind] | {'config_groups': {'group_0': group}}


def pack(kind, integers, zeros, scales):
  """Tensors of a matrix: integers [K, N], zero points and scales [C, N]."""
  if kind == COMPRESSED:
    tensors = {
      'weight_packed': pack_rows(integers.T),
      'weight_scale': np.ascontiguousarray(scales.T),
      'weight_shape': np.array(integers.T.shape),
    }
    if (zeros != 8).any():
      packed = np.ascontiguousarray(pack_rows(zeros).T)
      tensors['weight_zero_point'] = packed
    return tensors
  if kind == 'awq':
    words, zeros = pack_rows(integers, AWQ_ORDER), pack_rows(zeros, AWQ_ORDER)
  else:
    words = pack_rows(integers.T).T
    zeros = pack_rows(zeros if kind == 'gptq_v2' else zeros - 1)
  words = np.ascontiguousarray(words)
  return {'qweight': words, 'qzeros': zeros, 'scales': scales}


def write(directory, kind, family, *, group_size, is_symmetric=False, **config):
  """Writes a packed checkpoint, and beside it one of the same weights."""

  def quantize(name, weight, generator):
    if weight.ndim == 3:
      return quantize_experts(name, weight, generator)
    base = name.removesuffix('.weight')
    if not base.endswith('_proj'):
      return None
    num_outputs, num_inputs = weight.shape
    size = num_inputs if group_size == -1 else group_size
    shape = num_inputs // size, num_outputs
    integers = generator.integers(0, 16, (num_inputs, num_outputs))
    zeros = np.full(shape, 8)
    if not is_symmetric:
      # Less one, so that 16 is stored as 15.
      least = int(kind == 'gptq')
      zeros = generator.integers(least, least + 16, shape)
    scales = generator.uniform(0.5, 1.5, shape) * num_inputs**-0.5 / 4
    scales = scales.astype(np.float16)
    tensors = pack(kind, integers, zeros, scales)
    group_of = np.arange(num_inputs) // size
    if kind.startswith('gptq'):
      tensors['g_idx'] = group_of.astype(np.int32)
    wide = (integers - zeros[group_of]) * scales[group_of].astype(np.float32)
    return (
      np.ascontiguousarray(wide.T, np.float32),
      {f'{base}.{part}': tensor for part, tensor in tensors.items()},
    )

  def quantize_experts(name, weight, generator):
    """Of Llama 4: a tensor of all experts is stored matrix by matrix."""
    start, stacked = name.rsplit('.', 1)
    parts = ['gate', 'up'] if stacked == 'gate_up_proj' else ['down']
    wide, stored = np.zeros_like(weight), {}
    for i, matrix in enumerate(wide):
      pieces = np.split(matrix.T, len(parts))
      for part, piece in zip(parts, pieces, strict=True):
        piece[:], tensors = quantize(
          f'{start}.{i}.{part}_proj.weight', piece, generator
        )
        stored |= tensors
    return wide, stored

  options = options_of(kind, group_size, is_symmetric)
  return write_pair(directory, family, quantize, options, **config)
