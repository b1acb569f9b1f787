"""One test body for all products with quantized weights of experts.

The kernels run in their interpreters, that of the TPU with simulated copies,
race detection and memory that starts as NaN. The oracle is numpy in float64,
row by row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import implementations
from kernel_calls import check_suits

from kernels_pallas.grouped_matmul import api, arg_specs, pallas_gpu, pallas_tpu
from swiftspec_jax.runtime import sharding

pytestmark = pytest.mark.usefixtures('no_races')

IMPLEMENTATIONS = implementations(
  'grouped_matmul',
  pallas_tpu=pallas_tpu.Config(block_rows=16, block_outputs=128),
  pallas_gpu=pallas_gpu.Config(block_outputs=16),
)
NUM_EXPERTS = 5
NUM_INPUTS, NUM_OUTPUTS = 192, 144  # not of whole tiles of 128
# dtype of the rows, and groups.
WEIGHTS = {
  'int8': ('float32', 1),
  'int4': ('bfloat16', 3),
  'float8_e4m3fn': ('bfloat16', 3),
  'mxfp4': ('float32', 6),
}
# Of the sum of absolute products, as in quantized_matmul_test.
TOLERANCES = {'float32': 2**-20, 'bfloat16': 2**-8}
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by the bits of MXFP4
NUMBERS = np.concatenate([NUMBERS, -NUMBERS])
NUM_ROWS = 40  # of three blocks, the last with padding
CHOICES = {
  'all, anywhere': np.sort(np.arange(NUM_ROWS) * 7 % NUM_EXPERTS),
  'one expert, the last': np.full(NUM_ROWS, 4),
  'blocks of their own': np.repeat([0, 2, 3], [16, 16, 8]),
  'single rows': np.repeat([0, 1, 3, 4], [1, 15, 1, 23]),
}


@functools.cache
def compiled(name):
  return jax.jit(IMPLEMENTATIONS[name])


@functools.cache
def arguments(weight_dtype, num_rows=NUM_ROWS):
  random = np.random.default_rng(0)
  dtype, num_groups = WEIGHTS[weight_dtype]
  highest = {'int8': 128, 'float8_e4m3fn': 16}.get(weight_dtype, 8)
  shape = NUM_EXPERTS, NUM_INPUTS, NUM_OUTPUTS
  values = random.integers(-highest, highest, shape)
  scales = random.uniform(0.01, 1, (NUM_EXPERTS, num_groups, NUM_OUTPUTS))
  if weight_dtype == 'mxfp4':
    scales, weight_dtype = random.integers(122, 130, scales.shape), 'int4'
  is_bits = np.issubdtype(scales.dtype, np.integer)
  return (
    random.normal(size=(num_rows, NUM_INPUTS)).astype(jnp.dtype(dtype)),
    values.astype(jnp.dtype(weight_dtype)),
    scales.astype(np.uint8 if is_bits else np.float32),
  )


def check(product, arrays, chosen):
  x, values, scales = (np.asarray(array, np.float64) for array in arrays)
  if arrays[2].dtype == jnp.uint8:
    values, scales = NUMBERS[values.astype(int) & 15], 2.0 ** (scales - 127)
  weights = values * np.repeat(scales, NUM_INPUTS // scales.shape[1], axis=1)
  want = np.stack([row @ weights[e] for row, e in zip(x, chosen, strict=True)])
  scale = [abs(r) @ abs(weights[e]) for r, e in zip(x, chosen, strict=True)]
  error = abs(np.asarray(product, np.float64) - want)
  assert product.dtype == arrays[0].dtype
  assert (error <= TOLERANCES[arrays[0].dtype.name] * np.stack(scale)).all()


@pytest.mark.parametrize('weight_dtype', WEIGHTS)
@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_rows_meet_their_experts(name, weight_dtype):
  arrays = arguments(weight_dtype)
  for chosen in CHOICES.values():
    product = compiled(name)(*arrays, np.asarray(chosen, np.int32))
    check(product, arrays, chosen)


@pytest.mark.parametrize('name', ['pallas_tpu', 'pallas_gpu'])
def test_one_token_and_one_row(name):
  for num_rows, chosen in ((3, [0, 1, 4]), (1, [2])):
    arrays = arguments('int4', num_rows)
    product = compiled(name)(*arrays, np.asarray(chosen, np.int32))
    check(product, arrays, chosen)


@pytest.mark.parametrize('name', ['pallas_tpu', 'pallas_gpu'])
def test_rows_do_not_depend_on_others(name):
  """Nor experts without rows on what these hold."""
  x, values, scales = arguments('int8')
  chosen = CHOICES['blocks of their own'].astype(np.int32)
  alone = np.asarray(compiled(name)(x, values, scales, chosen))
  x, scales = x.copy(), scales.copy()
  x[20:] = scales[1] = np.nan
  beside = np.asarray(compiled(name)(x, values, scales, chosen))
  np.testing.assert_array_equal(beside[:20], alone[:20])


@pytest.mark.parametrize('axes', [(None, 'expert_ffw'), ('expert_ffw', None)])
def test_shares_of_devices(axes):
  mesh = sharding.make_mesh(jax.devices()[:3])
  on_mesh = sharding.sharding_of(mesh, (None, *axes))
  arrays, chosen = arguments('mxfp4'), CHOICES['single rows']
  call = functools.partial(api.grouped_matmul, sharding=on_mesh)
  product = jax.jit(call)(*arrays, chosen.astype(np.int32))
  check(product, arrays, chosen)


@pytest.mark.parametrize('backend', [pallas_tpu, pallas_gpu])
@pytest.mark.parametrize(
  ('shapes', 'message'),
  [
    (((513, 64), (1, 64, 128), (1, 1, 128)), '513 rows are more than 512'),
    (((2, 72), (1, 72, 128), (1, 9, 128)), '72 inputs in 9 groups are no'),
  ],
)
def test_what_kernels_cannot_do(backend, shapes, message):
  dtypes = ('bfloat16', 'int4', 'float32')
  with pytest.raises(NotImplementedError, match=message):
    backend.check(*map(jax.ShapeDtypeStruct, shapes, dtypes))


def test_kernels_take_the_shapes_of_models():
  for spec in arg_specs.arg_specs():
    arrays, message = spec.arrays()[:3], 'in another order'
    pallas_gpu.check(*arrays)
    check_suits(spec, 'pallas_tpu', message, pallas_tpu.check, *arrays)
