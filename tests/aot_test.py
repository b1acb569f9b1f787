"""Rows of the table of `make aot`, and shapes that its kernels accept."""

import dataclasses

import jax
import jax.numpy as jnp
from kernel_calls import check_suits

from experiments.aot import models, rows, steps, targets
from experiments.aot.kernels import KERNELS
from kernels_pallas import registry
from kernels_pallas.paged_attention import arg_specs as paged_specs
from kernels_pallas.quantized_matmul import arg_specs as quantized_specs
from kernels_pallas.quantized_matmul import mosaic_gpu
from kernels_pallas.tree_attention import arg_specs as attention_specs
from kernels_pallas.tree_attention import pallas_gpu, pallas_tpu


class HostTarget(targets.Target):
  """The simulated devices of this process."""

  @property
  def devices(self):
    return jax.devices()


HOST = HostTarget(
  name='host', platform='cpu', topology='host', bytes_per_device=10_000
)


def row_of(shape, fn=jnp.sin, known=None):
  array = jax.ShapeDtypeStruct((shape,), jnp.float32)
  return rows.compile_job(
    rows.Job(
      name='sin',
      shape=f'[{shape}]',
      target=HOST,
      lower=lambda: jax.jit(fn).lower(array),
    ),
    known,
  )


def test_status_says_what_fits():
  row = row_of(1_000)
  assert (row.status, row.bytes_per_device) == ('fits', 8_000)
  assert row.compile_seconds > 0
  assert row_of(2_000).status == 'too large'


def test_what_has_not_changed_is_not_compiled_again():
  row = row_of(1_000)
  known = {row.fingerprint: row}
  assert row_of(1_000, known=known) is row
  for other in (row_of(1_001, known=known), row_of(1_000, jnp.cos, known)):
    assert other.fingerprint not in known


def test_a_refusal_is_a_row():
  def refuse(x):
    raise NotImplementedError('no such\n  instruction')

  row = row_of(8, refuse)
  assert (row.status, row.message) == ('refused', 'no such instruction')


def test_the_largest_array_that_devices_exchange():
  program = """
  %a = f32[8,100]{1,0} add(%x, %y)
  %b = bf16[4,8]{1,0:T(8,128)} all-reduce(%a), replica_groups={{0,1}}
  %c = (f32[2,8]{1,0}, u8[33]{0}) all-gather-start(%b), dimensions={0}
  """
  assert rows.largest_collective(program) == 64
  assert rows.largest_collective('%a = f32[8] add(%x, %y)') == 0


def test_what_the_tpu_compiler_says_of_a_device_that_is_too_small():
  message = (
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required '
    'for HLO temporaries (32.98G) exceeds available HBM (15.75G).'
  )
  assert rows.failure(message) == 'too large'
  assert rows.failure(message.replace('HBM', 'VMEM')) == 'refused'


def test_every_shape_is_one_that_the_kernels_take():
  for spec in attention_specs.arg_specs():
    queries, keys, _, _, mask, *_ = spec.arrays()
    for backend in (pallas_tpu, pallas_gpu):
      backend.check(queries, keys, mask.shape[2])


def test_the_product_for_hopper_has_every_shape_of_its_dtypes():
  for spec in quantized_specs.arg_specs():
    arrays = spec.arrays()
    check_suits(spec, 'mosaic_gpu', 'is not', mosaic_gpu.check, *arrays)


def test_pages_suit_the_kernels_that_take_them():
  for spec in paged_specs.arg_specs():
    queries, keys, _, table, *_ = spec.arrays()
    for name in registry.implementations('paged_attention'):
      check = registry.module('paged_attention', name).check
      message = 'no multiple of 128'
      check_suits(spec, name, message, check, queries, keys, table.shape[1])


def test_shapes_are_listed_once():
  for specs, _ in KERNELS.values():
    sizes = {dataclasses.replace(spec, name='') for spec in specs}
    assert len(sizes) == len(specs)


def test_steps_have_the_arguments_of_the_programs():
  (pair,) = models.PAIRS['tiny']
  jobs = list(steps.jobs(pair, HOST))
  assert len(jobs) == 6
  for job in jobs:
    assert 'main' in job.lower().as_text()
