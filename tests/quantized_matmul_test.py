"""One test body for all products with quantized weights.

The kernels run in their interpreters, that of the TPU with simulated copies,
race detection and memory that starts as NaN. The oracle is numpy in float64.
"""

import contextlib
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import strategies as st
from interpreters import HAS_GPU_INTERPRETER, implementations, interpreting_gpu

from kernels_pallas import dispatch
from kernels_pallas.grouped_matmul import pallas_gpu as grouped_gpu
from kernels_pallas.quantized_matmul import (
  api,
  arg_specs,
  mosaic_gpu,
  pallas_gpu,
  pallas_tpu,
  reference,
  tiles,
)
from swiftspec_jax.runtime import sharding

pytestmark = pytest.mark.usefixtures('no_races')

IMPLEMENTATIONS = implementations(
  'quantized_matmul',
  pallas_tpu=pallas_tpu.Config(block_outputs=128),
  # Four programs for three chunks: one has nothing to do.
  pallas_gpu=pallas_gpu.Config(block_outputs=16, num_splits=4),
)
COMPILED = {name: jax.jit(call) for name, call in IMPLEMENTATIONS.items()}
NUM_PARTS, NUM_INPUTS, NUM_OUTPUTS = 2, 192, 144  # not of whole tiles of 128
WEIGHTS = {'int8': 1, 'int4': 3, 'float8_e4m3fn': 3}  # groups
# Of the sum of absolute products. float32: the order of sums. bfloat16: the
# result is rounded by 2**-9 of itself, and in the reference each weight, too.
TOLERANCES = {'float32': 2**-20, 'bfloat16': 2**-8}


def arguments(seed, num_rows, dtype, weight_dtype):
  random = np.random.default_rng(seed)
  highest = 2 ** (tiles.BITS[weight_dtype] - 1)
  num_groups = WEIGHTS[weight_dtype]
  values = random.integers(
    -highest, highest, (NUM_PARTS, NUM_INPUTS, NUM_OUTPUTS)
  )
  scales = random.uniform(0.01, 1, (NUM_PARTS, num_groups, NUM_OUTPUTS))
  return (
    random.normal(size=(num_rows, NUM_INPUTS)).astype(jnp.dtype(dtype)),
    values.astype(jnp.dtype(weight_dtype)),
    scales.astype(np.float32),
  )


def check(product, arrays):
  x, values, scales = (np.asarray(array, np.float64) for array in arrays)
  weight = values * np.repeat(scales, NUM_INPUTS // scales.shape[1], axis=1)
  want = np.einsum('tk,pkn->tpn', x, weight)
  scale = np.einsum('tk,pkn->tpn', abs(x), abs(weight))
  error = abs(np.asarray(product, np.float64) - want)
  assert product.dtype == arrays[0].dtype
  assert (error <= TOLERANCES[arrays[0].dtype.name] * scale).all()


@pytest.mark.parametrize('weight_dtype', WEIGHTS)
@pytest.mark.parametrize(
  ('dtype', 'num_rows'), [('float32', 16), ('bfloat16', 1)]
)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=3)
def test_any_weight(name, dtype, weight_dtype, seed, num_rows):
  arrays = arguments(seed, num_rows, dtype, weight_dtype)
  check(COMPILED[name](*arrays), arrays)


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason='needs JAX 0.11')
@pytest.mark.parametrize(
  ('weight_dtype', 'num_rows', 'num_splits', 'activation'),
  [
    ('int8', 5, 2, None),
    # Four programs for three chunks: one has nothing to do.
    ('int4', 16, 4, None),
    ('int4', 1, 1, 'silu'),
  ],
)
def test_mosaic_gpu_equals_oracle(
  weight_dtype, num_rows, num_splits, activation
):
  x, values, scales = arguments(5, num_rows, 'bfloat16', weight_dtype)
  arrays = x, values[..., :128], scales[..., :128]
  call = functools.partial(
    mosaic_gpu.quantized_matmul,
    activation=activation,
    config=mosaic_gpu.Config(num_splits=num_splits, num_stages=2),
  )
  with interpreting_gpu():
    got = jax.jit(call)(*arrays)
  if activation is None:
    check(got, arrays)
    return
  want = reference.quantized_matmul(
    x.astype(np.float32), *arrays[1:], activation=activation
  )
  np.testing.assert_allclose(
    np.asarray(got, np.float32), want, atol=2**-8 * abs(want).max()
  )


@pytest.mark.parametrize('name', ['pallas_tpu', 'pallas_gpu'])
def test_padding_does_not_leak(name):
  """Rows do not depend on those after them, whatever these hold."""
  x, *weight = arguments(0, 20, 'bfloat16', 'int4')
  alone = COMPILED[name](x[:1], *weight)
  x[1:] = np.nan
  padded = np.asarray(COMPILED[name](x, *weight))
  np.testing.assert_array_equal(padded[:1], alone)


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_gates_are_joined(name):
  arrays = arguments(4, 5, 'float32', 'int4')
  got = jax.jit(functools.partial(IMPLEMENTATIONS[name], activation='silu'))(
    *arrays
  )
  gate, up = np.moveaxis(COMPILED['reference'](*arrays), 1, 0)
  want = gate * scipy.special.expit(gate) * up
  got = np.asarray(got)[:, 0]
  np.testing.assert_allclose(got, want, atol=2e-6 * abs(want).max())


@pytest.mark.parametrize(
  ('axes', 'weight_dtype'),
  [
    ((None, 'ffw'), 'int4'),
    (('ffw', None), 'int4'),
    (('ffw', None), 'int8'),
    ((None, None), 'float8_e4m3fn'),
  ],
)
def test_shares_of_devices(axes, weight_dtype):
  mesh = sharding.make_mesh(jax.devices()[:3])
  on_mesh = sharding.sharding_of(mesh, (None, *axes))
  arrays = arguments(1, 5, 'float32', weight_dtype)
  call = functools.partial(api.quantized_matmul, sharding=on_mesh)
  check(jax.jit(call)(*arrays), arrays)


@pytest.mark.parametrize(
  ('weight_dtype', 'num_outputs', 'chosen'),
  [
    ('int4', 128, 'mosaic_gpu'),
    ('int4', 144, 'pallas_gpu'),
    ('float8_e4m3fn', 128, 'pallas_gpu'),
  ],
)
def test_triton_takes_what_hopper_cannot(weight_dtype, num_outputs, chosen):
  x, *weight = arguments(6, 3, 'bfloat16', weight_dtype)
  call = functools.partial(
    api.quantized_matmul,
    implementation='mosaic_gpu',
    sharding=sharding.sharding_of(sharding.make_mesh(), (None, None, None)),
  )
  jax.eval_shape(call, x, *(array[..., :num_outputs] for array in weight))
  newest = [c for c in dispatch.choices() if c.kernel == 'quantized_matmul'][-1]
  assert newest.implementation == chosen


@pytest.mark.parametrize('backend', [pallas_tpu, pallas_gpu, mosaic_gpu])
@pytest.mark.parametrize(
  ('shapes', 'message'),
  [
    (((65, 64), (1, 64, 128), (1, 1, 128)), '65 rows are more than 64'),
    (((2, 72), (1, 72, 128), (1, 9, 128)), '72 inputs in 9 groups are no'),
  ],
)
def test_what_kernels_cannot_do(backend, shapes, message):
  dtypes = ('bfloat16', 'int4', 'float32')
  arrays = map(jax.ShapeDtypeStruct, shapes, dtypes)
  with pytest.raises(NotImplementedError, match=message):
    backend.check(*arrays)


def test_the_gpu_takes_few_rows_of_float32():
  arrays = arguments(3, 17, 'float32', 'int8')
  with pytest.raises(NotImplementedError, match='17 rows of float32 are more'):
    pallas_gpu.check(*arrays)


@pytest.mark.parametrize(
  ('num_experts', 'weight_dtype', 'is_refused'),
  [
    (128, 'int8', False),  # 2**31 numbers
    (129, 'int8', True),
    (256, 'float8_e4m3fn', True),
    (257, 'int8', False),  # offsets have 64 bits
    (256, 'int4', False),
    (257, 'int4', True),
  ],
)
def test_offsets_that_would_wrap_are_refused(
  num_experts, weight_dtype, is_refused
):
  x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)
  values = jax.ShapeDtypeStruct((num_experts, 4096, 4096), weight_dtype)
  scales = jax.ShapeDtypeStruct((num_experts, 32, 4096), jnp.float32)
  refusal = pytest.raises(NotImplementedError, match='fit into 31 bits')
  for backend in (pallas_gpu, grouped_gpu):
    with refusal if is_refused else contextlib.nullcontext():
      backend.check(x, values, scales)


def test_examples_are_of_the_class_of_such_a_call():
  """So a verdict on an example holds for the call."""
  for spec in arg_specs.arg_specs():
    call = arg_specs.ArgSpec.of_call(*spec.arrays(), **spec.options())
    assert call.shape_class() == spec.shape_class()
