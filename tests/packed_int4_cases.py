"""Packs matrices as AWQ and GPTQ checkpoints do, number by number."""

import numpy as np
from checkpoint_cases import change_config
from safetensors import numpy as safetensors_numpy

from swiftspec_jax import testing

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
  """Writes a packed checkpoint, and beside it one of the same weights.

  Returns:
    Both directories.
  """
  packed, plain = directory / 'packed', directory / 'plain'
  for path in (packed, plain):
    testing.write_tiny_checkpoint(path, family, **config)
  stacked = safetensors_numpy.load_file(plain / 'model.safetensors')
  weights = one_by_one(stacked)
  generator = np.random.default_rng(0)
  stored = {}
  for name, weight in sorted(weights.items()):
    base = name.removesuffix('.weight')
    if not base.endswith('_proj'):
      stored[name] = weight
      continue
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
    for part, tensor in pack(kind, integers, zeros, scales).items():
      stored[f'{base}.{part}'] = tensor
    group_of = np.arange(num_inputs) // size
    if kind.startswith('gptq'):
      stored[f'{base}.g_idx'] = group_of.astype(np.int32)
    weights[name] = np.ascontiguousarray(
      ((integers - zeros[group_of]) * scales[group_of].astype(np.float32)).T,
      np.float32,
    )
  safetensors_numpy.save_file(stored, packed / 'model.safetensors')
  weights = stack(weights, stacked)
  safetensors_numpy.save_file(weights, plain / 'model.safetensors')
  change_config(
    packed, quantization_config=options_of(kind, group_size, is_symmetric)
  )
  return packed, plain


def one_by_one(weights):
  """Returns the tensors with those of all experts (Llama 4) cut in matrices."""
  found = {}
  for name, array in weights.items():
    start, kind = name.rsplit('.', 1)
    if array.ndim < 3:
      found[name] = array
      continue
    for i, matrix in enumerate(array):
      names = ['gate', 'up'] if kind == 'gate_up_proj' else ['down']
      for part, piece in zip(
        names, np.split(matrix.T, len(names)), strict=True
      ):
        found[f'{start}.{i}.{part}_proj.weight'] = np.ascontiguousarray(piece)
  return found


def stack(weights, like):
  """Undoes `one_by_one`."""
  found = {}
  for name, array in like.items():
    start, kind = name.rsplit('.', 1)
    if array.ndim < 3:
      found[name] = weights[name]
      continue
    names = ['gate', 'up'] if kind == 'gate_up_proj' else ['down']
    found[name] = np.ascontiguousarray(
      [
        np.concatenate(
          [weights[f'{start}.{i}.{part}_proj.weight'] for part in names]
        ).T
        for i in range(len(array))
      ]
    )
  return found
