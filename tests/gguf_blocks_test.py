"""Weights in the blocks of .gguf files: products, rows, and models of them.

The oracle is the gguf package's own dequantization, and sums in float64.
"""

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_test import KIND, tiny_gguf
from same_bits_test import check

import swiftspec_jax as ss
from kernels_pallas.gguf_blocks import native
from swiftspec_jax.checkpoint import builtin, gguf_header
from swiftspec_jax.distillation import trainer
from swiftspec_jax.models.matrices.stored_blocks import BlockMatrix
from swiftspec_jax.models.matrices.transposed import TransposedMatrix

NUM_INPUTS, NUM_OUTPUTS, START = 512, 37, 32
# Where the half floats of a block are.
HALVES = {'Q6_K': [104], 'Q4_0': [0], 'Q5_0': [0], 'Q8_0': [0]}
SIZES = {
  'hidden_size': 64,
  'intermediate_size': 96,
  'head_dim': 32,
  'num_hidden_layers': 1,
  'layer_types': ['full_attention'],
}


@functools.cache
def draw(kind, num_inputs=NUM_INPUTS):
  """Returns a tensor of random blocks, and its weights."""
  rng = np.random.default_rng(native.KINDS[kind].number)
  sizes = native.KINDS[kind]
  shape = NUM_OUTPUTS, num_inputs // sizes.size, sizes.num_bytes
  blocks = rng.integers(0, 256, shape, np.uint8)
  halves = blocks.view(np.float16)
  places = HALVES.get(kind, [0, 1])
  halves[..., places] = rng.uniform(0.5, 2, (*shape[:2], len(places)))
  rows = blocks.reshape(NUM_OUTPUTS, -1)
  before = rng.integers(0, 256, START, np.uint8)
  weights = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
  return np.concatenate([before, rows.ravel()]), weights


def rounded(rows):
  """Returns rows as integers of int8 times their scales."""
  blocks = rows.reshape(len(rows), -1, 32)
  highest = np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-30)
  integers = np.rint(blocks * (np.float32(127) / highest)).astype(np.float64)
  return (integers * (highest / np.float32(127))).reshape(rows.shape)


@functools.cache
def program(*kinds):
  starts = (START,) * len(kinds)
  return jax.jit(lambda x, tensors: native.multiply(x, tensors, kinds, starts))


@pytest.mark.parametrize('kind', native.KINDS)
def test_rows_are_multiplied_as_if_each_were_alone(kind):
  tensor, weights = draw(kind)
  rows = np.random.default_rng(0).standard_normal((41, NUM_INPUTS), np.float32)
  rows[[5, 40]] = 0
  got = np.asarray(program(kind)(rows, [tensor]))
  want = rounded(rows) @ weights.T.astype(np.float64)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
  for start, stop in ((0, 1), (9, 20), (30, 41)):
    part = program(kind)(rows[start:stop], [tensor])
    np.testing.assert_array_equal(part, got[start:stop])


def test_outputs_of_tensors_of_several_kinds_are_one_behind_the_other():
  kinds = 'Q4_1', 'Q8_0', 'Q5_0'
  num_inputs = 96  # no whole vector
  tensors, weights = zip(*(draw(x, num_inputs) for x in kinds), strict=True)
  rows = np.random.default_rng(1).standard_normal((3, num_inputs), np.float32)
  got = program(*kinds)(rows, tensors)
  want = rounded(rows) @ np.concatenate(weights).T.astype(np.float64)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize('number', [np.nan, np.inf])
def test_a_row_with_what_is_no_number_has_none(number):
  rows = np.ones((2, NUM_INPUTS), np.float32)
  rows[1, 7] = number
  got = np.asarray(program('Q4_0')(rows, [draw('Q4_0')[0]]))
  assert np.isfinite(got[0]).all()
  assert np.isnan(got[1]).all()


@pytest.mark.parametrize('kind', native.KINDS)
def test_rows_of_a_table_are_those_of_the_gguf_package(kind):
  tensor, weights = draw(kind)
  indices = np.array([[3, 0], [36, 3]], np.int32)
  rows = native.take_rows(tensor, indices, kind, START, NUM_INPUTS)
  np.testing.assert_array_equal(rows, weights[indices])


def test_a_library_without_the_format_says_so(monkeypatch):
  native.check(['Q4_0'])
  monkeypatch.setattr(native, '_library_for', lambda _: 'gguf_blocks-2')
  tensor, _ = draw('Q8_0')
  with pytest.raises(jax.errors.JaxRuntimeError, match='without format 8'):
    native.take_rows(tensor, np.zeros(1, np.int32), 'Q8_0', START, NUM_INPUTS)


def load(path, **options):
  return ss.load(path, devices=jax.devices()[:1], **options)


@pytest.fixture(scope='module', params=['llama', 'qwen2', 'gemma3_text'])
def file(request, tmp_path_factory):
  directory = tmp_path_factory.mktemp(request.param)
  return tiny_gguf(directory, request.param, KIND.Q4_1, SIZES)


def test_a_model_has_the_weights_that_dequantization_gives(file):
  stored = load(file, weight_dtype='stored').params
  plain = load(file, weight_dtype='wide').params

  def compare(matrix, array):
    if not isinstance(matrix, BlockMatrix):
      np.testing.assert_array_equal(matrix, array)
      return
    if isinstance(array, TransposedMatrix):
      array = array.values
    else:  # a table
      np.testing.assert_array_equal(matrix.dequantized(), array)
    # Ones and zeros are integers of int8, too.
    every = matrix.multiply(np.eye(matrix.num_inputs, dtype=np.float32))
    np.testing.assert_allclose(np.moveaxis(every, 0, -1), array, atol=1e-6)

  def is_matrix(x):
    return isinstance(x, BlockMatrix | TransposedMatrix)

  jax.tree.map(compare, stored, plain, is_leaf=is_matrix)


def test_other_dtypes_have_the_norm_of_float32():
  tensor, _ = draw('Q4_K')
  rng = np.random.default_rng(0)
  rows, added = rng.standard_normal((2, 3, NUM_INPUTS)).astype(np.float16)
  scale = rng.standard_normal(NUM_INPUTS).astype(np.float32)

  def multiply(dtype):
    return native.multiply(
      jnp.asarray(rows, dtype),
      [tensor],
      ['Q4_K'],
      [START],
      jnp.asarray(added, dtype),
      scale,
      epsilon=1e-5,
    )

  (half, got), (wide, want) = multiply(jnp.float16), multiply(jnp.float32)
  np.testing.assert_array_equal(half, wide.astype(jnp.float16))
  np.testing.assert_array_equal(got, want)


def test_one_cpu_keeps_the_blocks_unless_it_is_told_otherwise(file):
  assert load(file).config.weight_dtype == 'stored'
  assert load(file, weight_dtype='wide').name == f'{load(file).name} (wide)'
  for options in ({'dtype': 'float32'}, {'kernels': 'reference'}):
    assert load(file, **options).config.weight_dtype is None
  shared = ss.load(file, devices=jax.devices()[:2])
  assert shared.config.weight_dtype is None


def test_no_draft_begins_with_blocks(file, tmp_path):
  target = load(file, weight_dtype='stored')
  with pytest.raises(ss.UserError, match="load it with dtype='float32'"):
    trainer.Trainer(None, target, tmp_path, tmp_path, devices=jax.devices()[:1])


def test_its_steps_have_the_same_bits_in_any_company(file):
  if 'gemma3' in str(file):
    pytest.skip('norms of queries are XLA code, which rounds as shapes say')
  check(load(file, weight_dtype='stored'), seed=0)


def mapped(path):
  """Returns the addresses at which this process has mapped a file."""
  with open('/proc/self/maps', encoding='utf-8') as lines:
    ranges = [line.split()[0] for line in lines if str(path) in line]
  return [[int(x, 16) for x in pair.split('-')] for pair in ranges]


def test_the_file_is_mapped_and_not_copied():
  path = builtin.fetch('smollm2-135m-instruct')
  params = load(path, weight_dtype='stored', num_layers=1).params
  pages = mapped(path)
  matrices = [params['embedding'], *params['layers'][0].values()]
  tensors = [x.tensors for x in matrices if isinstance(x, BlockMatrix)]
  for tensor in jax.tree.leaves(tensors):
    address = tensor.unsafe_buffer_pointer()
    assert any(start <= address < stop for start, stop in pages)


def test_kinds_of_sizes_as_in_the_gguf_package():
  for name, kind in native.KINDS.items():
    known = gguf.GGMLQuantizationType[name]
    assert kind.number == known
    assert gguf.GGML_QUANT_SIZES[known] == (kind.size, kind.num_bytes)


def test_what_is_refused(tmp_path):
  stored = functools.partial(load, weight_dtype='stored')
  path = tiny_gguf(tmp_path, 'llama', KIND.F16, SIZES)
  with pytest.raises(ss.UserError, match='has type F16, and weight_dtype='):
    stored(path)
  with pytest.raises(ss.UserError, match='blocks of GGUF files, and these'):
    stored(tmp_path)
  with pytest.raises(ss.UserError, match='native kernels on one CPU, not for'):
    ss.load(path, weight_dtype='stored', devices=jax.devices()[:2])
  with pytest.raises(ss.UserError, match="not for kernels='reference'"):
    stored(path, kernels='reference')


def test_headers_tell_where_a_tensor_lies(file):
  _, tensors = gguf_header.read(file)
  for tensor in tensors.values():
    assert tensor.start < 64
    assert tensor.aligned.ctypes.data % 64 == 0
