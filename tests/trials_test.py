"""Kernels are compared with their references before 'auto' takes them.

In child processes, with kernels that are no good on purpose, interpreted.
"""

import dataclasses
import functools
import itertools
import json
import sys

import jax
import numpy as np
import pytest
from bad_kernels.arg_specs import ArgSpec
from jax.experimental.pallas import tpu as pltpu
from kernel_calls import API_CALLS

from experiments.kernels import check
from experiments.kernels.kernel_cases import KERNELS
from kernels_pallas import comparison, dispatch, registry, trials, tuning
from kernels_pallas.swiglu import arg_specs as swiglu_specs
from kernels_pallas.tree_attention import arg_specs as attention_specs
from kernels_pallas.tree_attention import reference as attention_reference

SPEC = ArgSpec(name='tiny', num_tokens=3)
AGREES = 'agrees with the reference within 0.0e+00'
_TIMES = itertools.count()
UNCOMPARED = 'pallas_gpu has not been compared with the reference'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """Of the verdicts: none yet."""
  monkeypatch.setenv('SWIFTSPEC_CACHE', str(tmp_path))
  return tmp_path / 'kernel_verdicts'


def choose(kernel, spec=SPEC):
  """Returns what a new process takes on a GPU with 'auto', and the reason."""
  trial = functools.partial(trials.verdict, kernel, spec, None)
  checks = {'pallas_gpu': lambda: None}
  shape = f'{spec.name} for the time {next(_TIMES)}'
  chosen = dispatch.choose(kernel, shape, 'auto', 'gpu', checks, trial)
  return chosen, dispatch.choices()[-1].reason


def test_a_kernel_that_agrees_is_compared_once(folder, monkeypatch):
  want = ('pallas_gpu', f'made for gpu; {AGREES}')
  assert choose('right') == want
  # Another one is compared by the same child, as a start takes long.
  child = trials._CHILD._process.pid
  assert choose('right', dataclasses.replace(SPEC, num_tokens=9)) == want
  assert trials._CHILD._process.pid == child
  # From here on each child ends with status 1.
  monkeypatch.setattr(sys, 'executable', '/bin/false')
  assert choose('right') == want
  same_class = dataclasses.replace(SPEC, name='other', num_tokens=4)
  assert choose('right', same_class) == want
  for changes in ({'num_tokens': 5}, {'dtype': 'bfloat16'}):
    chosen, reason = choose('right', dataclasses.replace(SPEC, **changes))
    assert chosen == 'reference'
    assert f'{UNCOMPARED}: before it, the child process failed' in reason


def test_what_was_compared_here_is_not_compared_again(monkeypatch):
  for kernel in ('right', 'wrong'):
    found = comparison.compare(kernel, 'pallas_gpu', SPEC)
    trials.keep(kernel, SPEC, 'pallas_gpu', found)
  monkeypatch.setattr(sys, 'executable', '/bin/false')
  assert choose('right') == ('pallas_gpu', f'made for gpu; {AGREES}')
  chosen, reason = choose('wrong')
  assert chosen == 'reference'
  assert reason.startswith('pallas_gpu differs from the reference by ')


def test_damaged_verdicts_are_replaced(folder, monkeypatch):
  monkeypatch.setattr(sys, 'executable', '/bin/false')
  choose('right')
  (path,) = folder.glob('*.json')
  kept = path.read_text()
  for damage in ('', '[]', '{"is_good": true}'):
    path.write_text(damage)
    assert choose('right')[0] == 'reference'
    assert path.read_text() == kept


@pytest.mark.parametrize(
  ('kernel', 'reason'),
  [
    ('crashing', 'crashed by SIGSEGV, when it was compared'),
    ('hanging', 'took more than 1 s, when it was compared'),
  ],
)
def test_a_kernel_that_is_no_good_gives_the_reference(
  kernel, reason, monkeypatch
):
  if kernel == 'hanging':
    monkeypatch.setattr(trials, 'SECONDS', 1.0)
  chosen, why = choose(kernel)
  assert chosen == 'reference'
  assert why.startswith(f'pallas_gpu {reason}')
  # The verdict is kept.
  monkeypatch.setattr(sys, 'executable', '/bin/false')
  assert choose(kernel) == (chosen, why)


def test_what_could_not_be_compared_can_be_later(monkeypatch, capsys):
  """A device that one process can open, and a wrong kernel."""
  with monkeypatch.context() as patch:
    patch.setattr(trials, 'EXCLUSIVE_PLATFORMS', ('cpu',))
    chosen, reason = choose('wrong')
    assert (chosen, reason.partition(':')[0]) == ('reference', UNCOMPARED)
    assert 'python -m experiments.kernels check' in reason
  check.run()
  assert '0 of 1 kernels agree' in capsys.readouterr().out
  chosen, reason = choose('wrong')
  assert chosen == 'reference'
  assert reason.startswith('pallas_gpu differs from the reference by ')
  assert reason.endswith('of its largest number, more than 9.5e-07')
  assert not trials.check_uncompared()


@pytest.mark.parametrize('kernel', KERNELS)
def test_what_is_compared_are_the_shapes_of_the_call(
  kernel, folder, monkeypatch
):
  """As if CPUs had the kernels of TPUs, or those of GPUs; nothing runs."""
  implementation, *_ = registry.implementations(kernel)
  spec = KERNELS[kernel][0][0]
  call = functools.partial(API_CALLS[kernel], **spec.options())

  def notes():
    # Another function each time, so that it is traced.
    jax.eval_shape(lambda *arrays: call(*arrays), *spec.arrays())
    return [json.loads(path.read_text()) for path in folder.glob('*.json')]

  monkeypatch.delitem(dispatch._OF_PLATFORM, 'cpu')
  assert not notes()  # there is no kernel, so nothing is compared
  monkeypatch.setitem(dispatch._OF_PLATFORM, 'cpu', (implementation,))
  monkeypatch.setattr(trials, 'EXCLUSIVE_PLATFORMS', ('cpu',))
  monkeypatch.setattr(dispatch, '_choices', {})
  # Two kernels fall back on others, which are compared as well.
  made = [note['trial'] for note in notes()]
  (trial,) = [trial for trial in made if trial['kernel'] == kernel]
  assert trial['implementation'] == implementation
  found = comparison.load_spec(trial['package'], trial['spec'])
  if implementation == 'native':
    spec = spec.small()
  assert found.options() == spec.options()
  assert tuning.shapes_of(found.arrays()) == tuning.shapes_of(spec.arrays())


ATTENTION = attention_specs.ArgSpec(
  name='tiny',
  num_tokens=4,
  num_kv_heads=1,
  num_groups=2,
  head_dim=64,
  context=1_000,
  tree_size=8,
  dtype='bfloat16',
  window=None,
)


def test_a_kernel_agrees_in_its_interpreter():
  spec = swiglu_specs.ArgSpec(
    name='tiny',
    num_tokens=2,
    embed_dim=128,
    ffw_dim=128,
    activation='silu',
    dtype='float32',
  )
  with pltpu.force_tpu_interpret_mode():
    found = comparison.compare('swiglu', 'pallas_tpu', spec)
  assert found.is_same
  assert found.max_error <= found.tolerance == 2**-16


def test_a_comparison_sees_one_row_of_a_tree():
  attend = jax.jit(
    functools.partial(attention_reference.tree_attention, **ATTENTION.options())
  )
  results = {False: [], True: []}
  for *arrays, mask, positions in ATTENTION.draws(jax.random.key(0)):
    for is_wrong, its in results.items():
      flipped = mask.at[0, 0, 0].set(mask[0, 0, 0] ^ is_wrong)
      its.append(np.asarray(attend(*arrays, flipped, positions)))
  found = comparison.compare_results(ATTENTION, results[True], results[False])
  assert not found.is_same


def test_other_shapes_and_nan_are_not_the_same():
  want = [np.asarray([1, -np.inf], np.float32)]
  for got in (
    np.asarray([np.nan, -np.inf], np.float32),
    np.asarray([1, 0], np.float32),
    np.asarray([1], np.float32),
    np.asarray([1, -np.inf], np.float64),
  ):
    assert not comparison.compare_results(SPEC, [got], want).is_same
  assert comparison.compare_results(SPEC, want, want).is_same
