"""The ablation: its rows and pictures, and a run."""

import dataclasses
import json
import re

import benchmark_report_test
import programs
import pytest

import swiftspec_jax as ss
from experiments.studies import (
  ablation_plot,
  ablation_report,
  ablation_settings,
)
from swiftspec_jax import errors

COLUMNS = (
  'name',
  'settings',
  'tokens_per_second',
  'round_seconds',
  'target_step_seconds',
  'draft_step_seconds',
  'overlap_fraction',
  'acceptance_length',
  'hit_rate',
  'late_hit_rate',
  'miss_rate',
  'host_seconds_per_round',
)
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


def rows_of(records, timelines=None):
  return ablation_report.make_rows(
    ALL, records, timelines or {}, is_greedy=True
  )


def test_configurations_differ_in_what_they_are_named_after():
  by_name = {c.name: c for c in ALL}
  assert len(by_name) == len(ALL)
  assert set(ablation_settings.MAIN) < set(by_name)
  base = by_name['async']
  assert base.tree == by_name['serial'].tree
  assert base.tree == ss.TreeConfig(width=8, prompt_lookup=False)
  assert by_name['async_lockstep'] == dataclasses.replace(
    base, name='async_lockstep', run_ahead=0
  )
  tree = by_name['async_restart'].tree
  assert tree.num_restart_steps
  assert dataclasses.replace(tree, num_restart_steps=0) == base.tree
  for name, switches in ablation_settings.LOOKUPS.items():
    for mode in ('serial', 'async'):
      tree = dataclasses.replace(base.tree, **switches)
      assert by_name[f'{mode}_{name}'].tree == tree
  for mode in ('serial', 'async'):
    assert by_name[f'{mode}_num_nodes_16'].tree.num_nodes == 16
    assert by_name[f'{mode}_num_draft_steps_1'].tree.num_draft_steps == 1


def test_switches_of_the_flags_stay_in_their_rows():
  tree = ss.TreeConfig(
    num_restart_steps=3,
    prompt_lookup=True,
    suffix_lookup=True,
  )
  found = ablation_settings.configurations(tree, run_ahead=2)
  by_name = {c.name: c for c in found}
  assert by_name['async'].tree == ss.TreeConfig(prompt_lookup=False)
  assert by_name['async'].run_ahead == 2
  assert by_name['async_restart'].tree.num_restart_steps == 3


def test_unknown_configurations_are_named():
  assert ablation_settings.choose(ALL, []) == ALL
  with pytest.raises(errors.UserError, match="unknown name 'asinc'; choose"):
    ablation_settings.choose(ALL, ['async', 'asinc'])


def test_rows_are_medians_over_the_repeats():
  records = [record('autoregressive', i, 4.0) for i in range(3)]
  records += [
    record('async', i, seconds, num_accepted=2)
    for i, seconds in enumerate((1.0, 2.0, 8.0))
  ]
  timelines = {'async': {'target_step_seconds': 0.5, 'overlap_fraction': 0.9}}
  plain, tree = rows_of(records, timelines)
  assert set(COLUMNS) <= set(plain)
  assert (plain['name'], tree['name']) == ('autoregressive', 'async')
  assert plain['tokens_per_second'] == 1.0
  assert plain['hit_rate'] is plain['target_step_seconds'] is None
  assert tree['tokens_per_second'] == 2.0
  assert tree['speedup'] == 2.0
  assert tree['round_seconds'] == 2.0  # the first one is not timed
  assert tree['acceptance_length'] == 2.0
  assert tree['hit_rate'] == tree['miss_rate'] == 0.5
  assert tree['host_seconds_per_round'] == 0.002
  assert tree['target_step_seconds'] == 0.5
  assert tree['draft_step_seconds'] is None
  assert tree['overlap_fraction'] == 0.9
  assert tree['outputs_equal'] is True
  assert tree['settings']['num_nodes'] == 8
  json.dumps([plain, tree])


def test_another_output_is_reported():
  rows = rows_of(
    [
      record('autoregressive', 0, 4.0),
      record('serial', 0, 4.0, token_ids=(1, 2, 3, 5)),
    ]
  )
  assert rows[1]['outputs_equal'] is False
  assert ablation_report.table(rows).splitlines()[-1].endswith('NO')


def test_sweeps_have_the_common_point():
  rows = rows_of(
    [
      record('async', 0, 1.0),
      record('async_num_nodes_4', 0, 2.0),
      record('async_num_nodes_16', 0, 4.0),
      record('serial_num_nodes_4', 0, 4.0),
    ]
  )
  points = ablation_report.sweep(rows, 'async', 'num_nodes')
  assert points == [(4, 2.0), (8, 4.0), (16, 1.0)]
  assert ablation_report.sweep(rows, 'async', 'width') == [(8, 4.0)]
  assert ablation_plot.draw_sweeps(rows, 'title').startswith(b'\x89PNG')


def test_pictures_need_something_to_show():
  plain = rows_of([record('autoregressive', 0, 1.0)])
  assert ablation_plot.draw_speed(plain, 'title').startswith(b'\x89PNG')
  assert ablation_plot.draw_sweeps(plain, 'title') is None
  assert ablation_plot.draw_acceptance([], 'title') is None
  assert ablation_plot.draw_speed([], 'title') is None


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
    '--timeline_tokens=12',
    '--forced_acceptance=0.7',
    f'--output_dir={tmp_path}',
  ]
  output = programs.output_of('swiftspec_ablation', *flags)
  assert 'forced acceptance 0.7' in output
  assert len(programs.read_lines(tmp_path, 'results.jsonl')) == 12
  assert len(programs.read_lines(tmp_path, 'timelines.jsonl')) == 2
  rows = programs.read_lines(tmp_path)
  assert [row['name'] for row in rows] == names
  for row in rows:
    assert row['outputs_equal'] is True
    assert row['num_repeats'] == 2
    assert row['tokens_per_second'] > 0
    assert row['forced_acceptance'] == (
      None if row['name'] == 'autoregressive' else 0.7
    )
  trees = rows[1:]
  assert all(row[column] is not None for row in trees for column in COLUMNS)
  table = output.splitlines()
  assert any(re.match('async +8/8/4 ', line) for line in table)
  facts = json.loads((tmp_path / 'provenance.json').read_text())
  assert facts['flags']['draft_layers'] == 1
  assert facts['device_count'] == 2
  for name in ('speed', 'acceptance'):
    picture = (tmp_path / f'{name}.png').read_bytes()
    assert picture.startswith(b'\x89PNG')
