"""Product and all-reduce on simulated devices, in the TPU's interpreter.

The oracle is a product in float64 of the same rounded inputs. With weights of
variance 1 / K the results are of order one. Tolerances: float32 sums of up to
2048 terms keep five digits; in bfloat16 each device's part and the sum are
rounded to 8 bits, parts of order one for each of up to 8 devices.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import interpret_tpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.matmul_all_reduce import (
  api,
  arg_specs,
  mosaic_gpu,
  pallas_tpu,
  reference,
)

pytestmark = pytest.mark.usefixtures('no_races')

TOLERANCES = {'float32': 1e-5, 'bfloat16': 2e-2}


def sharding_on(num_devices):
  devices = np.asarray(jax.devices()[:num_devices]).reshape(1, -1)
  return NamedSharding(Mesh(devices, ('data', 'model')), PartitionSpec('model'))


def arguments(sharding, num_tokens, num_inputs, num_outputs, dtype):
  random = np.random.default_rng(0)
  x = random.normal(size=(1, num_tokens, num_inputs))
  weight = random.normal(size=(num_inputs, num_outputs))
  weight /= math.sqrt(num_inputs)
  whole = NamedSharding(sharding.mesh, PartitionSpec())
  return (
    jax.device_put(jnp.asarray(x, dtype), whole),
    jax.device_put(jnp.asarray(weight, dtype), sharding),
  )


def oracle(x, weight):
  x, weight = (
    np.asarray(a, np.float32).astype(np.float64) for a in (x, weight)
  )
  return x @ weight


@pytest.mark.parametrize('implementation', ['reference', 'pallas_tpu'])
@pytest.mark.parametrize(
  ('num_devices', 'num_tokens', 'num_outputs', 'dtype'),
  [
    (8, 5, 384, 'float32'),
    (2, 1, 256, 'float32'),
    # One tile that is no whole lanes.
    (4, 8, 96, 'float32'),
    (8, 16, 256, 'bfloat16'),
  ],
)
def test_equals_oracle(
  implementation, num_devices, num_tokens, num_outputs, dtype, monkeypatch
):
  # Three tiles of columns, so that they are exchanged while others are made.
  monkeypatch.setattr(pallas_tpu, '_BLOCK_BYTES', 1)
  sharding = sharding_on(num_devices)
  x, weight = arguments(sharding, num_tokens, 256, num_outputs, dtype)
  call = functools.partial(
    api.matmul_all_reduce, implementation=implementation, sharding=sharding
  )
  with pltpu.force_tpu_interpret_mode(interpret_tpu()):
    got = jax.jit(call)(x, weight)
  assert (got.dtype, got.shape) == (x.dtype, (1, num_tokens, num_outputs))
  copies = [
    np.asarray(shard.data, np.float32) for shard in got.addressable_shards
  ]
  for copy in copies[1:]:
    np.testing.assert_array_equal(copy, copies[0])
  tolerance = TOLERANCES[dtype]
  np.testing.assert_allclose(
    copies[0], oracle(x, weight), atol=tolerance, rtol=tolerance
  )


def test_calls_in_a_row_do_not_mix():
  """A device may begin the next call while others end this one."""
  sharding = sharding_on(4)
  x, weight = arguments(sharding, 3, 256, 256, 'float32')

  def twice(x, weight):
    call = functools.partial(
      api.matmul_all_reduce, implementation='pallas_tpu', sharding=sharding
    )
    return call(call(x, weight), weight)

  with pltpu.force_tpu_interpret_mode(interpret_tpu()):
    got = jax.jit(twice)(x, weight)
  want = oracle(oracle(x, weight), weight)
  np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('implementation', ['auto', 'pallas_gpu'])
def test_reference_stands_in(implementation):
  sharding = sharding_on(2)
  x, weight = arguments(sharding, 3, 256, 256, 'float32')
  got = api.matmul_all_reduce(
    x, weight, sharding=sharding, implementation=implementation
  )
  np.testing.assert_array_equal(got, reference.matmul_all_reduce(x, weight))


def test_what_the_kernel_does_not_take_is_named():
  sharding = sharding_on(2)
  x, weight = arguments(sharding, 33, 256, 256, 'float32')
  with pytest.raises(NotImplementedError, match='33 tokens are more than 32'):
    api.matmul_all_reduce(
      x, weight, sharding=sharding, implementation='pallas_tpu'
    )


def test_gpu_takes_all_shapes():
  """Traced only: no interpreter has memory of peers; `make aot` compiles it."""
  for spec in arg_specs.arg_specs():
    x, weight = spec.arrays()
    call = functools.partial(
      api.matmul_all_reduce,
      implementation='mosaic_gpu',
      sharding=sharding_on(spec.num_devices),
    )
    got = jax.eval_shape(call, x, weight)
    assert (got.dtype, got.shape[2]) == (x.dtype, spec.num_outputs)


def test_gpu_adds_parts_of_all_devices_only():
  with pytest.raises(NotImplementedError, match='4 devices of 8 share'):
    mosaic_gpu.check(8, 4)
