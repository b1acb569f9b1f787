"""The parts of a round: which operation belongs to which, and their times."""

import jax
import jax.numpy as jnp
import programs
import pytest

from experiments.measuring import round_parts, round_profile

# A target of two matrices of 4 x 12 and 12 x 4 and a table of 20 x 4, over two
# tokens, in the style of XLA for CPUs: products have no names.
PROGRAM = """\
HloModule jit_run_step, is_scheduled=true, entry_computation_layout={()->()}

FileNames
1 "decoder.py"

%fused_product (param_0: f32[12,4], param_1: f32[2,4]) -> f32[12,2] {
  %param_0 = f32[12,4]{1,0} parameter(0)
  %param_1 = f32[2,4]{1,0} parameter(1)
  ROOT %dot.0 = f32[12,2]{1,0} dot(%param_0, %param_1), rhs_contracting_dims={1}
}

%fused_scale (param_2: f32[2,4]) -> f32[2,4] {
  %param_2 = f32[2,4]{1,0} parameter(0)
  ROOT %mul.0 = f32[2,4]{1,0} multiply(%param_2, %param_2), metadata={op_name="jit(run_step)/target_forward/layer_0/mul"}
}

ENTRY %main (x: f32[2,4], up: f32[12,4], down: f32[4,12], table: f32[20,4]) -> (s32[2], f32[2,4]) {
  %x = f32[2,4]{1,0} parameter(0)
  %up = f32[12,4]{1,0} parameter(1)
  %down = f32[4,12]{1,0} parameter(2)
  %table = f32[20,4]{1,0} parameter(3)
  %norm = f32[2,4]{1,0} fusion(%x), kind=kLoop, calls=%fused_scale
  %scores = f32[2,2]{1,0} dot(%norm, %x), lhs_contracting_dims={1}
  %softmax = f32[2,2]{1,0} exponential(%scores), metadata={op_name="jit(run_step)/target_forward/layer_0/attention/exp"}
  %attended = f32[2,4]{1,0} dot(%softmax, %x), lhs_contracting_dims={1}
  %copy.1 = f32[2,4]{0,1} copy(%attended)
  %ynn_fusion = f32[12,2]{1,0} fusion(%up, %copy.1), kind=kCustom, calls=%fused_product
  %dot.1 = f32[2,4]{1,0} dot(%ynn_fusion, %down), lhs_contracting_dims={0}
  %add.1 = f32[2,4]{1,0} add(%dot.1, %x), metadata={op_name="jit(run_step)/target_forward/layer_0/add"}
  %dot.2 = f32[20,2]{1,0} dot(%table, %add.1), lhs_contracting_dims={1}
  %wrapped = s32[2]{0} reduce(%dot.2), to_apply=%best, metadata={op_name="jit(run_step)/verify/reduce"}
  %pad = f32[2,4]{1,0} pad(%add.1), metadata={op_name="jit(run_step)/pad"}
  ROOT %tuple.1 = (s32[2]{0}, f32[2,4]{1,0}) tuple(%wrapped, /*index=1*/%pad)
}
"""  # noqa: E501
WEIGHTS = round_parts.Weights(products=frozenset({48}), tables=frozenset({80}))


def test_each_operation_belongs_to_the_part_of_its_scope():
  program = round_parts.read_program(PROGRAM)
  assert program.name == 'jit_run_step'
  parts = round_parts.parts(program, WEIGHTS)
  expected = {
    'norm': 'rest',
    'scores': 'attention',
    'softmax': 'attention',
    'attended': 'attention',
    'ynn_fusion': 'products',
    'dot.1': 'products',
    'add.1': 'rest',
    'dot.2': 'unembedding',
    'wrapped': 'verify',
    'pad': 'other',
  }
  assert {name: parts[name] for name in expected} == expected


@pytest.mark.parametrize(
  ('scope', 'part'),
  [
    ('jit(advance)/grow/while/body/closed_call/layer_0/add', 'rest'),
    ('jit(advance)/grow/while/body/children/top_k', 'children'),
    ('jit(advance)/restart/cond/branch_1_fun/gather', 'growth'),
    ('jit(advance)/reroot/gather', 'reroot'),
    ('jit(advance)/look_up/vmap(eq)', 'look_up'),
    ('jit(advance)/select/top_k', 'select'),
    ('jit(run_step)/commit/dynamic_slice', 'commit'),
  ],
)
def test_the_innermost_scope_counts(scope, part):
  program = round_parts.read_program(
    'HloModule jit_advance\n\nENTRY %main (x: f32[2]) -> f32[2] {\n'
    '  %x = f32[2]{0} parameter(0)\n'
    f'  ROOT %y = f32[2]{{0}} negate(%x), metadata={{op_name="{scope}"}}\n}}\n'
  )
  assert round_parts.parts(program, WEIGHTS)['y'] == part


def test_times_are_without_those_of_operations_inside():
  times = round_parts.self_times(
    [
      (100, 10, 'jit_advance', 'select'),
      (0, 100, 'jit_advance', 'while'),
      (10, 30, 'jit_advance', 'call'),
      (10, 20, 'jit_advance', 'dot'),
      (50, 20, 'jit_advance', 'dot'),
    ]
  )
  assert {name: time for (_, name), time in times.items()} == {
    'while': 50,
    'call': 10,
    'dot': 40,
    'select': 10,
  }
  shares = round_parts.shares(
    times | {('jit_other', 'dot'): 1000},
    {'jit_advance': {'dot': 'products', 'call': 'products', 'while': 'growth'}},
  )
  assert shares == {'products': 50 / 110, 'growth': 50 / 110, 'other': 10 / 110}


def test_operations_of_a_run_are_found_in_its_program():
  def tiny_round(x, matrix, table):
    with jax.named_scope('layer_0'):
      x = jnp.tanh(x @ matrix)
    logits = x @ table
    with jax.named_scope('verify'):
      return jnp.argmax(logits, axis=-1)

  step = jax.jit(tiny_round)
  arrays = jnp.ones((8, 64)), jnp.ones((64, 64)), jnp.ones((64, 4096))
  step(*arrays).block_until_ready()
  times = round_profile.times_of_operations(
    lambda: step(*arrays).block_until_ready()
  )
  weights = round_parts.Weights(
    products=frozenset({64 * 64}), tables=frozenset({64 * 4096})
  )
  (program,) = round_profile.compiled_programs(['jit_tiny_round'])
  shares = round_parts.shares(
    times, {program.name: round_parts.parts(program, weights)}
  )
  assert {'products', 'rest', 'unembedding', 'verify'} <= set(shares)
  assert shares['unembedding'] > shares['rest']


@pytest.mark.slow
def test_program_takes_a_round_apart(model, tmp_path):
  output = programs.output_of(
    'profile_decode',
    f'--target={model}',
    f'--draft={model}',
    '--draft_layers=1',
    '--mode=async',
    '--num_steps=16',
    '--repeats=1',
    f'--output_dir={tmp_path}',
  )
  rows = {row['part']: row for row in programs.read_lines(tmp_path)}
  assert list(rows)[:3] == ['plain_step', 'round', 'target']
  assert {'target/verify', 'draft/growth', 'draft/select', 'idle'} <= set(rows)
  whole = rows['round']['seconds']
  for part, row in rows.items():
    assert part in output
    assert row['share'] == pytest.approx(row['seconds'] / whole)
  for side in ('target', 'draft'):
    of_parts = [
      row['share'] for part, row in rows.items() if part.startswith(f'{side}/')
    ]
    assert sum(of_parts) == pytest.approx(rows[side]['share'])
    assert rows.get(f'{side}/other', {'share': 0})['share'] < 0.3


def test_flags_that_do_not_fit_are_refused():
  flags = '--mode=serial', '--prompt_tokens=9'
  error = programs.error_of('profile_decode', *flags)
  assert '--prompt_tokens is not used with --mode=serial' in error
