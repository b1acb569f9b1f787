"""The program that finds sizes writes what the others can use."""

import json
import re

import programs
import pytest

import swiftspec_jax as ss
from experiments.planning import plan_report
from swiftspec_jax.cli import configuration


@pytest.mark.ci
def test_configuration_is_made_and_used(model, tmp_path):
  path, start = tmp_path / 'tuned.json', tmp_path / 'config.json'
  # Wide trees have room for two draft forwards: few programs.
  planned = {'mode': 'async', 'num_nodes': 4}
  planned |= {'width': 64, 'num_draft_steps': 2}
  dtypes = dict.fromkeys(('weight_dtype', 'draft_weight_dtype'), 'bfloat16')
  chips = {'target_chips': 1, 'draft_chips': 1}
  settings = plan_report.flags_of({**planned, **chips, **dtypes})
  configuration.write(start, settings, [], device_kind=None)
  # As long as what is generated below: the same programs.
  prompts = programs.write_prompts(tmp_path, 'hello')
  # Without lookups, programs compile faster.
  lookup = '--tree_prompt_lookup=False'
  output = programs.output_of(
    'tune',
    lookup,
    f'--config={start}',
    f'--target={model}',
    f'--draft={model}',
    '--draft_layers=1',
    f'--prompts={prompts}',
    '--repeats=1',
    '--max_new_tokens=12',
    '--try_num_nodes=8',
    '--try_width=',
    f'--output={path}',
  )
  values = json.loads(path.read_text())
  settings = values['flags']
  chosen = [trial for trial in values['trials'] if trial['chosen']]
  stages = ['draft forwards', 'num_nodes', 'width']
  assert [trial['stage'] for trial in chosen] == stages
  for name in ('num_nodes', 'width', 'num_draft_steps'):
    assert settings[name] == chosen[-1][name]
    assert f'--{name}={settings[name]}' in output
  assert settings['mode'] == 'async'
  assert values['provenance']['versions']['jax']
  tried = {trial['num_nodes'] for trial in values['trials']}
  assert tried == {4, 8}
  first = values['trials'][0]
  assert [first[name] for name in planned if name != 'mode'] == [4, 64, 2]
  for forward in ('target +4', 'draft +64'):
    assert float(re.search(f'{forward} +([0-9.]+)', output)[1]) > 0
  assert 'One target forward takes' in output

  flags = lookup, f'--config={path}', '--prompt=hello', '--max_new_tokens=12'
  status, output, complaints = programs.run('generate', *flags, '--stats')
  assert status == 0, complaints
  (expected,) = ss.generate(ss.load(model), 'hello', max_new_tokens=12)
  assert output == f'{expected.text}\n'
  assert 'late hits' in complaints
  for program, *flags in (('generate', '--prompt=hello'), ('serve',)):
    error = programs.error_of(
      program, f'--config={path}', '--target=other', *flags
    )
    assert f'--target=other, but {path} was made for --target={model}' in error


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--output=/missing/x.json'], 'cannot write /missing/x.json: No such'),
    (['--output=x.json', '--try_width=a'], "--try_width: 'a' is not a whole"),
    (['--output=x.json', '--try_num_nodes=0'], 'num_nodes must be from 1'),
    (['--output=x.json', '--mode=chain'], 'flag --mode=chain: value should be'),
  ],
)
def test_bad_flags_get_one_line(flags, message):
  assert message in programs.error_of('tune', '--draft=x', *flags)
