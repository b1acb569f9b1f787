"""Products of few rows in C++: right, and the same bits in any company."""

import concurrent.futures
import functools

import gguf_test
import jax
import ml_dtypes
import numpy as np
import pytest
from scipy import special

import swiftspec_jax as ss
from kernels_pallas import dispatch
from kernels_pallas.few_rows import api, native, reference
from kernels_pallas.native import library
from kernels_pallas.swiglu import reference as swiglu_reference
from swiftspec_jax.runtime import sharding

DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}
ZEROS = [5, 66]  # rows for which no work is done
# Whole blocks, parts of blocks and of vectors, several axes, a single number.
SHAPES = ((100, (3, 7)), (576, (2, 6)), (7, (1,)))


def draw(dtype, *shape):
  rng = np.random.default_rng(sum(shape))
  return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


@functools.cache
def program(num_terms=1):
  return jax.jit(functools.partial(native.few_rows, num_terms=num_terms))


def check_parts(run, rows, got):
  """Fewer rows give the same bits."""
  for start, stop in ((0, 1), (9, 17), (len(rows) - 3, None)):
    np.testing.assert_array_equal(run(rows[start:stop]), got[start:stop])


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(('num_inputs', 'out_shape'), SHAPES)
def test_rows_are_multiplied_as_if_each_were_alone(
  dtype, num_inputs, out_shape
):
  rows = draw(dtype, 67, num_inputs)
  rows[ZEROS] = 0
  weight = draw(dtype, *out_shape, num_inputs)
  got = np.asarray(program()(rows, weight))
  want = np.tensordot(
    rows.astype(np.float64), weight.astype(np.float64), (1, -1)
  )
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, want, atol=4e-6 * np.sqrt(num_inputs))
  check_parts(lambda part: program()(part, weight), rows, got)


def active(x, activation):
  if activation == 'silu':
    return x * special.expit(x)
  return x * special.expit(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize('activation', [None, *swiglu_reference.ACTIVATIONS])
@pytest.mark.parametrize('num_inputs', [100, 576])
@pytest.mark.parametrize('dtype', DTYPES)
def test_norm_and_gate_are_those_of_float64(dtype, num_inputs, activation):
  rows, added = draw(dtype, 67, num_inputs), draw(dtype, 67, num_inputs) * 3
  added = added.astype(DTYPES[dtype])
  rows[ZEROS] = added[ZEROS] = rows[11] = added[12] = 0
  weight = draw(dtype, 2, 37, num_inputs)
  scale = draw('float32', num_inputs)
  multiply = jax.jit(
    functools.partial(native.few_rows, epsilon=1e-5, activation=activation)
  )

  def run(rows, added):
    return multiply(rows, weight, None, added, scale)

  total, got = map(np.asarray, run(rows, added))
  np.testing.assert_array_equal(
    total,
    (rows.astype(np.float32) + added.astype(np.float32)).astype(rows.dtype),
  )
  wide = total.astype(np.float64)
  square = np.mean(wide**2, axis=1, keepdims=True)
  normed = (wide / np.sqrt(square + 1e-5) * scale).astype(rows.dtype)
  want = np.tensordot(normed.astype(np.float64), weight, (1, -1))
  if activation:
    want = active(want[:, 0], activation) * want[:, 1]
  tolerance = 2**-16 if dtype == 'float32' else 2**-7
  np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())
  for part in (slice(0, 1), slice(3, 5), slice(9, 17)):
    for x, y in zip(run(rows[part], added[part]), (total, got), strict=True):
      np.testing.assert_array_equal(x, y[part])


@pytest.mark.parametrize('num_terms', [1, 2])
@pytest.mark.parametrize(('num_inputs', 'out_shape'), SHAPES)
def test_integers_are_those_of_the_reference(num_inputs, out_shape, num_terms):
  rng = np.random.default_rng(num_inputs)
  rows = draw('float32', 67, num_inputs)
  rows[ZEROS] = 0
  weight = rng.integers(-128, 128, (*out_shape, num_inputs), np.int8)
  scales = rng.uniform(0.5, 2, out_shape).astype(np.float32)
  run = functools.partial(program(num_terms), weight=weight, scales=scales)
  got = np.asarray(run(rows))
  want = reference.few_rows(rows, weight, scales, num_terms=num_terms)
  np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-3)
  check_parts(run, rows, got)


def test_sums_of_the_highest_integers_are_exact():
  rows = np.full((3, 4096), 127, np.float32)
  weight = np.full((5, 4096), -128, np.int8)
  product = program()(rows, weight, np.ones(5, np.float32))
  np.testing.assert_array_equal(product, np.full((3, 5), -4096 * 127 * 128.0))


def test_the_choice_names_the_reason():
  rows, weight = draw('float32', 2, 24), draw('float32', 6, 24)
  want = rows @ weight.T
  for kernels, reason in (
    ('auto', 'made for cpu; agrees'),
    ('native', 'asked'),
  ):
    got = api.few_rows(rows, weight, implementation=kernels)
    np.testing.assert_allclose(got, want, atol=1e-5)
    newest = dispatch.choices()[-1]
    assert (newest.kernel, newest.implementation) == ('few_rows', 'native')
    assert newest.reason.startswith(reason)


def test_several_devices_take_the_reference():
  one, two = (sharding.make_mesh(jax.devices()[:n]) for n in (1, 2))
  assert api.usable_on(one, 'auto') == 'auto'
  assert api.usable_on(one, 'native') == 'native'
  assert api.usable_on(one, 'pallas_tpu') == 'reference'
  assert api.usable_on(two, 'auto') == 'reference'


def test_devices_that_share_a_pool_do_not_wait_for_each_other():
  """More callers at once than the pool has threads."""
  rows, weight = draw('float32', 4, 512), draw('float32', 4096, 512)
  want = np.asarray(program()(rows, weight))
  placed = [jax.device_put((rows, weight), x) for x in jax.devices()]
  for _ in range(3):
    for product in [program()(*arrays) for arrays in placed]:
      np.testing.assert_array_equal(product, want)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
  """A library that is not there yet, as a new process sees it."""
  monkeypatch.setenv('SWIFTSPEC_CACHE', str(tmp_path))
  for name in ('digest', '_problem'):
    uncached = getattr(library, name).__wrapped__
    monkeypatch.setattr(library, name, functools.cache(uncached))


@pytest.mark.usefixtures('fresh')
@pytest.mark.parametrize(
  ('compiler', 'seconds', 'reason'),
  [
    ('no-such-compiler', 300, 'there is no C\\+\\+ compiler .*; install one'),
    ('false', 300, 'false cannot compile them'),
    ('false', 0, 'false took more than 0 s'),
  ],
)
def test_without_a_compiler_xla_takes_over(
  compiler, seconds, reason, monkeypatch, model, tmp_path
):
  monkeypatch.setenv('CXX', compiler)
  monkeypatch.setattr(library, '_SECONDS', seconds)
  width = len(compiler) + seconds  # a shape of its own
  rows, weight = draw('float32', 1, 8), draw('float32', width, 8)
  got = api.few_rows(rows, weight)
  np.testing.assert_allclose(got, rows @ weight.T, atol=1e-5)
  newest = dispatch.choices()[-1]
  assert newest.implementation == 'reference'
  with pytest.raises(NotImplementedError, match=reason):
    library.check('few_rows')
  assert library.status() in newest.reason
  with pytest.raises(ss.UserError, match=f"kernels='native': {reason}"):
    ss.load(model, kernels='native', devices=jax.devices()[:1])
  sizes = {'intermediate_size': 64}
  file = gguf_test.tiny_gguf(tmp_path, 'llama', gguf_test.KIND.Q8_0, sizes)
  with pytest.raises(ss.UserError, match=f"weight_dtype='stored': {reason}"):
    ss.load(file, weight_dtype='stored', devices=jax.devices()[:1])


def test_several_devices_cannot_insist(model):
  with pytest.raises(ss.UserError, match="kernels='native' is for one device"):
    ss.load(model, kernels='native', devices=jax.devices()[:2])


@pytest.mark.usefixtures('fresh')
def test_it_is_compiled_once_by_all_that_want_it(monkeypatch, tmp_path):
  """A compiler that notes its calls and gives itself for the library."""
  compiler = tmp_path / 'compiler'
  compiler.write_text(
    '#!/bin/sh\necho called >> $(dirname $0)/calls\nsleep 0.2\n'
    'while [ "$1" != -o ]; do shift; done\n'
    'cp $0 $2\n'
  )
  compiler.chmod(0o755)
  monkeypatch.setenv('CXX', str(compiler))
  with concurrent.futures.ThreadPoolExecutor(3) as threads:
    list(threads.map(library._compile, ['few_rows'] * 3))
  assert (tmp_path / 'calls').read_text() == 'called\n'
  assert library._path('few_rows').read_bytes() == compiler.read_bytes()
