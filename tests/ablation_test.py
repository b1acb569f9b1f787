"""The ablation: its configurations, and a run."""

import dataclasses

import benchmark_report_test
import programs
import pytest

import swiftspec_jax as ss
from experiments.studies import ablation_settings
from swiftspec_jax import errors

ALL = ablation_settings.configurations(ss.TreeConfig(width=8), run_ahead=1)


def record(name, repeat, seconds, *, num_accepted=0, token_ids=(1, 2, 3, 4)):
  is_tree = name != 'autoregressive'
  return benchmark_report_test.record(
    1,
    name,
    repeat=repeat,
    token_ids=token_ids,
    decode_seconds=seconds,
    num_rounds=4 - num_accepted,
    num_accepted=num_accepted,
    num_hits=is_tree,
    num_misses=is_tree,
    host_seconds=0.004,
  )


def test_configurations_differ_in_what_they_are_named_after():
  by_name = {c.name: c for c in ALL}
  assert len(by_name) == len(ALL)
  base = by_name['async']
  assert base.tree == by_name['serial'].tree
  assert base.tree == ss.TreeConfig(width=8, prompt_lookup=False)
  assert by_name['async_lockstep'] == dataclasses.replace(
    base, name='async_lockstep', run_ahead=0
  )
  tree = by_name['async_restart'].tree
  assert tree.num_restart_steps
  assert dataclasses.replace(tree, num_restart_steps=0) == base.tree
  tree = dataclasses.replace(base.tree, prompt_lookup=True)
  for mode in ('serial', 'async'):
    assert by_name[f'{mode}_prompt_lookup'].tree == tree


def test_switches_of_the_flags_stay_in_their_rows():
  tree = ss.TreeConfig(num_restart_steps=3, prompt_lookup=True)
  found = ablation_settings.configurations(tree, run_ahead=2)
  by_name = {c.name: c for c in found}
  assert by_name['async'].tree == ss.TreeConfig(prompt_lookup=False)
  assert by_name['async'].run_ahead == 2
  assert by_name['async_restart'].tree.num_restart_steps == 3


def test_unknown_configurations_are_named():
  assert ablation_settings.choose(ALL, []) == ALL
  with pytest.raises(errors.UserError, match="unknown name 'asinc'; supported"):
    ablation_settings.choose(ALL, ['async', 'asinc'])


@pytest.mark.ci
def test_program(model, tmp_path):
  names = ['autoregressive', 'serial', 'async']
  flags = [
    f'--target={model}',
    f'--draft={model}',
    '--draft_layers=1',
    f'--configurations={",".join(names)}',
    '--limit=2',
    '--repeats=2',
    '--max_new_tokens=20',
    '--forced_acceptance=0.7',
    f'--output_dir={tmp_path}',
  ]
  output = programs.output_of('swiftspec_ablation', *flags)
  assert 'async (forced acceptance 0.7)' in output
  assert len(programs.read_lines(tmp_path, 'results.jsonl')) == 12
  summary = programs.read_summary(tmp_path)
  assert list(summary['modes']) == names
  for name, figures in summary['modes'].items():
    assert figures['outputs_equal'] is True
    assert figures['tokens_per_second'] > 0
    assert figures['forced_acceptance'] == (
      None if name == 'autoregressive' else 0.7
    )
  rows = programs.read_lines(tmp_path, 'acceptance.jsonl')
  assert {row['settings'] for row in rows} == {'base'}
  assert summary['provenance']['flags']['draft_layers'] == 1
  assert summary['provenance']['device_count'] == 2
  picture = (tmp_path / 'results.png').read_bytes()
  assert picture.startswith(b'\x89PNG')
