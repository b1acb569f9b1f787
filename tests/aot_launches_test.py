"""Kernels counted in programs by hand."""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.aot import launches, layer_launches, rows, targets

_PROGRAM = """\
HloModule jit_step, is_scheduled=true

%region_0.3 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_add (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add = f32[8]{0} add(%p, %p)
}

%body.1 (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %i = s32[] get-tuple-element(%state), index=0
  %next = s32[] fusion(%i), kind=kLoop, calls=%fused_add
  %two = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kInput, calls=%fused_add
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %x)
}

%condition.1 (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] fusion(%state.1), kind=kLoop, calls=%fused_add
}

%left (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %copy.1 = f32[8]{0} copy(%q)
}

%right (r: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} parameter(0)
}

ENTRY %main.9 (x.1: f32[8], p.1: pred[]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %p.1 = pred[] parameter(1)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[8]{0}) tuple(%zero, %x.1)
  %loop = (s32[], f32[8]{0}) while(%begin), condition=%condition.1, body=%body.1, metadata={op_name="jit(step)/while"}
  %y = f32[8]{0} get-tuple-element(%loop), index=1
  %start = f32[8]{0} all-reduce-start(%y), to_apply=%region_0.3
  %done = f32[8]{0} all-reduce-done(%start)
  %call = f32[8]{0} call(%done), to_apply=%left
  %named = f32[8]{0} custom-call(%call), custom_call_target="__cublas$gemm"
  ROOT %z = f32[8]{0} conditional(%p.1, %named, %named), branch_computations={%left, %right}
}
"""  # noqa: E501


def test_kernels_of_a_turn_of_a_loop():
  """The loop's condition is a part of both."""
  assert launches.by_loop(_PROGRAM) == {
    launches.ONCE: {'num_kernels': 4, 'num_all_reduces': 1},
    'jit(step)/while': {'num_kernels': 3, 'num_all_reduces': 0},
  }


def test_kernels_of_all_turns_that_are_known():
  program = _PROGRAM.replace(
    ', metadata={op_name="jit(step)/while"}',
    ', backend_config={"known_trip_count":{"n":"5"}}',
  )
  counts = {'num_kernels': 4 + 5 * 3, 'num_all_reduces': 1}
  assert launches.by_loop(program) == {launches.ONCE: counts}


def test_a_layer_is_what_programs_of_two_depths_differ_by():
  host = targets.Target(
    name='host', platform='cuda', topology='host', bytes_per_device=0
  )
  names = [job.shape for job in layer_launches.jobs(host)]
  # Of two dtypes and depths, with and without kernels.
  assert len(names) == len(layer_launches.PARTS) * 2 * 2 * 2
  row = rows.Row(
    name='draft grow',
    topology='host',
    shape='4 layers, int4, kernels 4+4',
    status='fits',
    launches={
      launches.ONCE: {'num_kernels': 9, 'num_all_reduces': 0},
      'jit(grow)/grow/while': {'num_kernels': 60, 'num_all_reduces': 8},
    },
  )
  assert row.shape in names
  other = dataclasses.replace(row, shape='8 layers')
  assert layer_launches.table([row, other]) == [
    {
      'step': 'draft grow',
      'weight_dtype': 'int4',
      'kernels': True,
      'num_layers': 4,
      'num_kernels': 60,
      'num_all_reduces': 8,
    }
  ]


def test_a_program_of_the_compiler_at_hand():
  def step(x):
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sort(y @ y, axis=0), x)

  text = jax.jit(step).lower(jnp.ones((8, 8))).compile().as_text()
  assert 'while(' in text
  found = launches.by_loop(text).values()
  assert sum(part['num_kernels'] for part in found) >= 2
