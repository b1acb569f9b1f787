"""The table of `kernels bench` on a CPU, and what it compares with."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.profiler import ProfileData

import swiftspec_jax as ss
from experiments.kernels import kernel_cases, kernel_timing
from kernels_pallas.quantized_matmul.reference import quantized_matmul


def smallest(kernel, **fields):
  """Returns the case with these fields that moves the fewest bytes."""
  return min(
    (
      case
      for case in kernel_cases.cases(kernel)
      if all(getattr(case.spec, k) == v for k, v in fields.items())
    ),
    key=lambda case: case.spec.num_bytes,
  )


def as_row(array):
  return np.asarray(array, np.float32).reshape(-1)


@pytest.mark.parametrize(
  ('num_tokens', 'window'), [(8, None), (8, 512), (1, None)]
)
def test_libraries_do_the_same(num_tokens, window):
  case = smallest(
    'tree_attention', num_tokens=num_tokens, window=window, has_sinks=False
  )
  arrays = case.spec.make_arrays(jax.random.key(1))
  reference, native, library = case.contenders('cpu')
  want = reference.call(*arrays)
  with jax.numpy_dtype_promotion('standard'):
    got = library.call(*library.prepare(*arrays))
  # Both round weights and outputs to 8 bits.
  np.testing.assert_allclose(as_row(got), as_row(want), atol=2e-2)
  own = native.call(*arrays)
  np.testing.assert_allclose(as_row(own), as_row(want), atol=2e-2)


def test_a_product_of_whole_weights_is_beside_quantized_ones():
  case = smallest('quantized_matmul', num_tokens=8, weight_dtype='int4')
  arrays = case.spec.make_arrays(jax.random.key(1))
  _, library = case.contenders('cpu')
  assert library.name == 'jnp.dot bfloat16'
  # With scales of 1 the two products are the same.
  x, values, scales = arrays
  got = library.call(*library.prepare(*arrays))
  want = quantized_matmul(x, values, jnp.ones_like(scales), activation=None)
  np.testing.assert_allclose(as_row(got), as_row(want), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize('kernel', kernel_cases.KERNELS)
def test_arguments_have_the_shapes_of_the_specs(kernel):
  case = smallest(kernel)
  arrays = jax.eval_shape(case.spec.make_arrays, jax.random.key(0))
  got, want = jax.tree.leaves(arrays), jax.tree.leaves(case.spec.arrays())
  assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]


PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  lines {
    name: "Stream #7(Compute)"
    timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 3000000 }
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000 }
  }
  lines {
    name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 7000000 }
  }
}
planes { name: "/host:CPU" }
"""


def test_times_are_those_of_the_device():
  found = kernel_timing.device_seconds(ProfileData.from_text_proto(PROFILE))
  np.testing.assert_allclose(found, [2e-6, 3e-6])


def test_a_profile_without_devices_is_refused():
  profile = ProfileData.from_text_proto('planes { name: "/host:CPU" }')
  with pytest.raises(ss.UserError, match='recorded no work of the device'):
    kernel_timing.device_seconds(profile)


def test_a_call_is_the_sum_of_its_pieces():
  pieces = [1.0, 2.0, 1.0, 9.0, 1.0, 3.0]
  assert kernel_timing.median_call(pieces, 3) == 4.0
  assert kernel_timing.median_call(pieces, 4) == 17 / 4


def test_sets_exceed_the_cache():
  assert kernel_timing.num_sets(100, 100, 450) == 5
  assert kernel_timing.num_sets(100, 100, 50) == 2
  assert kernel_timing.num_sets(1, 1, 10_000) == 64
  # Few of those that take much memory.
  assert kernel_timing.num_sets(100, 2**29, 10_000) == 4


def test_table_on_a_cpu(tmp_path):
  output = programs.output_of(
    'kernels',
    'bench',
    '--kernel=swiglu',
    '--kernel=verify_tree',
    '--shape=smollm2-135m/tp8 T1 bfloat16',
    '--shape=B1 T1 V49152',
    '--repeats=2',
    f'--output_dir={tmp_path}',
  )
  assert 'ONLY NATIVE KERNELS RUN ON A CPU' in output
  rows = programs.read_lines(tmp_path)
  assert [row['kernel'] for row in rows] == ['swiglu', 'verify_tree']
  for row in rows:
    assert row['implementation'] is row['speedup_over_reference'] is None
  assert rows[0]['seconds'].keys() == {'reference', 'jnp.dot bfloat16'}
  assert rows[1]['seconds'].keys() == {'reference'}
  summary = programs.read_summary(tmp_path)
  assert summary['rates']['bytes_per_second'] > 1e8
  assert summary['kernels']['swiglu']['num_shapes'] == 1
  assert summary['provenance']['device_kind'] == 'cpu'


def test_unknown_shape_is_named():
  complaint = programs.error_of('kernels', 'bench', '--shape=llama-9b')
  assert '--shape=llama-9b is in the name of no shape' in complaint
