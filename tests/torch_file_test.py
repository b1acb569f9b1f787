"""Checkpoints of torch, read without it."""

import struct
import zipfile

import eagle3_cases as cases
import numpy as np
import pytest
from eagle3_test import VOCAB_SIZE, WIDTH, target_of

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.checkpoint import torch_file

KINDS = {
  'float32': 'FloatStorage',
  'int64': 'LongStorage',
  'bool': 'BoolStorage',
}


def _text(value):
  encoded = value.encode()
  return b'X' + struct.pack('<i', len(encoded)) + encoded


def _integers(values):
  return b'(' + b''.join(b'J' + struct.pack('<i', x) for x in values) + b't'


def _tensor(key, array, offset=0):
  """The pickle of a tensor, as torch 2 writes it."""
  strides = [step // array.itemsize for step in array.strides]
  return b''.join(
    [
      b'ctorch._utils\n_rebuild_tensor_v2\n((',
      _text('storage'),
      f'ctorch\n{KINDS[array.dtype.name]}\n'.encode(),
      _text(key),
      _text('cpu'),
      b'J' + struct.pack('<i', array.size),
      b'tQJ' + struct.pack('<i', offset),
      _integers(array.shape),
      _integers(strides),
      b'\x89ccollections\nOrderedDict\n)RtR',
    ]
  )


def write(directory, tensors, *, pickled=None, **options):
  """Writes tensors; `pickled` in the place of what says what they are."""
  if pickled is None:
    items = [
      _text(name) + _tensor(str(i), array, **options)
      for i, (name, array) in enumerate(tensors.items())
    ]
    pickled = b'\x80\x02}(' + b''.join(items) + b'u.'
  with zipfile.ZipFile(directory / 'pytorch_model.bin', 'w') as archive:
    archive.writestr('archive/data.pkl', pickled)
    for i, array in enumerate(tensors.values()):
      # In the order of memory.
      archive.writestr(f'archive/data/{i}', array.tobytes(order='A'))


def test_a_head_of_torch_is_the_same_as_of_safetensors(tmp_path):
  weights = cases.make_weights(WIDTH, VOCAB_SIZE, 3)
  cases.write(
    tmp_path, 'sglang', weights, inputs=(1, 3, 4), vocab_size=VOCAB_SIZE
  )
  target = target_of(6)
  head = ss.load(tmp_path, draft_of=target)
  (tmp_path / 'model.safetensors').unlink()
  weights['fc.weight'] = np.asfortranarray(weights['fc.weight'])
  write(tmp_path, weights)
  again = ss.load(tmp_path, draft_of=target)
  np.testing.assert_array_equal(
    again.params['feature_projection'], head.params['feature_projection']
  )
  np.testing.assert_array_equal(
    again.params['output_token_ids'], head.params['output_token_ids']
  )


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'pickled': b'\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.'}, 'os.system'),
    ({'pickled': b'\x80\x02K\x01.'}, 'is no table of tensors'),
    ({'offset': 1}, 'outside its numbers'),
  ],
)
def test_what_is_no_tensor_is_refused(tmp_path, options, message):
  write(tmp_path, {'x': np.zeros((2, 3), np.float32)}, **options)
  with pytest.raises(errors.UserError, match=message):
    torch_file.read(tmp_path)
  (tmp_path / 'pytorch_model.bin').write_bytes(b'PK cut')
  with pytest.raises(errors.UserError, match='cut short'):
    torch_file.read(tmp_path)
